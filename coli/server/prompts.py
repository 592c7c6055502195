"""What a checked request asks the model to read, and its answer's one choice: shared by the routes and by batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import ValidationError

from coli.llm import LLM
from coli.server import bodies
from coli.server.logprobs import TokenLogprob
from coli.server.requests import UNIONS, ChatRequest, RefusedFieldError
from coli.server.tool_calls import parse_calls
from coli.server.worker import Done
from coli.text.prompt import chat_ids, plain_ids

Bytes = Callable[[int], bytes]


def conversation_ids(llm: LLM, body: ChatRequest, tools: list[dict[str, Any]] | None, think: bool | None) -> list[int]:
    """Ids of the conversation through the model's template. Raises RefusedFieldError, ChatTemplateError."""
    template, messages = llm.chat_template, [message.for_template() for message in body.messages]
    if template is None:
        if tools:
            raise RefusedFieldError("tools", "the model has no chat template to show them in")
        return plain_ids(llm.tokenizer, "\n".join(message["content"] for message in messages))
    if tools and not template.knows_tools:
        raise RefusedFieldError("tools", "the model's chat template has no place for tools")
    think = think if body.enable_thinking is None else body.enable_thinking
    variables = body.template_variables
    return chat_ids(llm.tokenizer, template, messages, enable_thinking=think, tools=tools, **variables)


def chat_choice(
    text: str,
    tool_names: set[str],
    answer_id: str,
    token_bytes: Bytes,
    logprobs: int | None,
    entries: Sequence[TokenLogprob],
    done: Done,
) -> dict[str, Any]:
    """The choice of a chat completion; text that calls one of `tool_names` becomes calls."""
    content, calls = parse_calls(text, tool_names) if tool_names else (text, [])
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if calls:
        message["tool_calls"] = bodies.call_list(calls, answer_id, indexed=False)
    return {
        "index": 0,
        "message": message,
        "logprobs": None if logprobs is None else bodies.chat_logprobs(token_bytes, entries),
        "finish_reason": "tool_calls" if calls else done.finish_reason,
    }


def completion_choice(
    text: str, token_bytes: Bytes, logprobs: int | None, entries: Sequence[TokenLogprob], done: Done
) -> dict[str, Any]:
    """The choice of a text completion."""
    return {
        "index": 0,
        "text": text,
        "logprobs": None if logprobs is None else bodies.completion_logprobs(token_bytes, entries, 0),
        "finish_reason": done.finish_reason,
    }


def fault(error: ValidationError) -> tuple[str | None, str, str | None]:
    """Field, message and code of the first thing wrong with a body."""
    found = error.errors(include_url=False, include_input=False)
    top = field_path(found[0]["loc"])
    # of a union each branch complains: the one that got furthest is what was meant
    paths = {at: path for at, each in enumerate(found) if (path := field_path(each["loc"])).startswith(top)}
    deepest = max(paths, key=lambda at: (len(found[at]["loc"]), -at))
    field = paths[deepest] or None
    if found[deepest]["type"] == "extra_forbidden":
        return field, f"{field}: unknown field", "unknown_field"
    same = [found[at]["msg"] for at, path in paths.items() if path == paths[deepest]]
    said = " or ".join(dict.fromkeys(message.removeprefix("Value error, ") for message in same))
    return field, f"{field or 'body'}: {said}", None


def field_path(places: Sequence[str | int]) -> str:
    """A field's path as clients know it, `messages[0].content`: without the names of the types a union tried."""
    path, before = "", ""
    for place in places:
        if isinstance(place, int):
            path += f"[{place}]"
        elif before not in UNIONS:
            path += f".{place}" if path else place
        before = str(place)
    return path
