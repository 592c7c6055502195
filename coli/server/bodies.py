"""Answers and errors as the OpenAI API spells them: plain dicts, ready for JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from coli.server.logprobs import TokenLogprob
from coli.server.tool_calls import Call
from coli.server.worker import Done, Part

Bytes = Callable[[int], bytes]


def error_body(status: int, message: str, field: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The error object of `status`; `field` is the request's field it is about, `code` what programs go by."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(status, kind)
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def usage(done: Done) -> dict[str, Any]:
    """Tokens of prompt and answer; of the prompt those not computed again, of the drafts those judged."""
    generated = len(done.token_ids)
    accepted = sum(counts["accepted"] for counts in done.drafts.values())
    return {
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": done.prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(c["judged"] for c in done.drafts.values()) - accepted,
        },
    }


def extras(done: Done) -> dict[str, Any]:
    """What this engine says beside the API's own fields."""
    return {"seed": done.seed, "forwards": done.forwards, "drafts": done.drafts}


def ending(done: Done) -> dict[str, Any]:
    """What only the end of an answer knows."""
    return {"usage": usage(done), "coli": extras(done)}


def _token(token_bytes: Bytes, token_id: int, logprob: float) -> dict[str, Any]:
    data = token_bytes(token_id)
    return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}


def part_list(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """The text of a chunk id by id: `source` of the draft that guessed it, how many drafts it stands in place of."""
    return [{"text": part.text, "source": part.origin.source, "rejected": part.origin.rejected} for part in parts]


def chat_logprobs(token_bytes: Bytes, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`logprobs` of a chat choice: natural logarithms, one entry an id, its bytes beside its text."""
    return {
        "content": [
            {
                **_token(token_bytes, entry.token_id, entry.logprob),
                "top_logprobs": [_token(token_bytes, *each) for each in entry.top],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def completion_logprobs(token_bytes: Bytes, entries: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """`logprobs` of a completion choice; `offset`: characters of the answer before the first of `entries`."""
    tokens = [token_bytes(entry.token_id).decode("utf-8", "replace") for entry in entries]
    offsets = [offset]
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    return {
        "tokens": tokens,
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [
            {token_bytes(i).decode("utf-8", "replace"): logprob for i, logprob in entry.top} for entry in entries
        ],
        "text_offset": offsets[:-1],
    }


def call_list(calls: Sequence[Call], answer_id: str, *, indexed: bool) -> list[dict[str, Any]]:
    """`tool_calls` of a message, or of a stream's delta (indexed)."""
    return [
        {
            **({"index": at} if indexed else {}),
            "id": f"call_{answer_id[-12:]}_{at}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for at, call in enumerate(calls)
    ]
