"""Answers as server-sent events: the events of a job turned into chunks as they come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import StreamingResponse

from coli.server import bodies
from coli.server.failures import http_error
from coli.server.logprobs import TokenLogprob
from coli.server.tool_calls import certain_text, parse_calls
from coli.server.worker import Done, Event, Failed, Job, Part, Piece


def sse(content: AsyncIterator[str]) -> StreamingResponse:
    """Server-sent events that end with the connection."""
    return StreamingResponse(content, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


class EventStream(StreamingResponse):
    """Server-sent events of a job, which ends with the response however that ends."""

    def __init__(self, content: AsyncIterator[str], job: Job) -> None:
        super().__init__(content, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._job = job

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancelled = True


@dataclass(frozen=True, slots=True)
class Extras:
    """What a stream tells beside the text: usage at its end, and which text was drafted."""

    usage: bool
    drafts: bool


async def chat_stream(
    head: dict[str, Any], token_bytes: bodies.Bytes, events: asyncio.Queue[Event], names: set[str], told_of: Extras
) -> AsyncIterator[str]:
    """The chunks of a chat answer; text that may be a call of one of the tools `names` waits for the end."""

    def chunk(
        delta: dict[str, Any],
        reason: str | None = None,
        entries: Sequence[TokenLogprob] = (),
        parts: Sequence[Part] = (),
    ) -> str:
        logprobs = bodies.chat_logprobs(token_bytes, entries) if entries else None
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return _event({**head, "choices": [choice], **({"coli": {"parts": bodies.part_list(parts)}} if parts else {})})

    yield chunk({"role": "assistant", "content": ""})
    text, told = "", 0
    while True:
        event = await events.get()
        if isinstance(event, Failed):
            yield _failed_event(event.error)
            return
        if isinstance(event, Piece):
            text += event.text
            until = certain_text(text) if names else len(text)
            if until > told or event.logprobs:
                parts = event.parts if told_of.drafts and not names else ()
                yield chunk({"content": text[told:until]}, entries=event.logprobs, parts=parts)
                told = max(told, until)
            continue
        reason = event.finish_reason
        if names:
            content, calls = parse_calls(text, names)
            if calls:
                reason = "tool_calls"
                if len(content) > told:
                    yield chunk({"content": content[told:]})
                yield chunk({"tool_calls": bodies.call_list(calls, head["id"], indexed=True)})
            elif len(text) > told:
                yield chunk({"content": text[told:]})
        yield chunk({}, reason)
        if told_of.usage:
            yield _event({**head, "choices": [], **bodies.ending(event)})
        yield "data: [DONE]\n\n"
        return


async def completion_stream(
    head: dict[str, Any], token_bytes: bodies.Bytes, events: asyncio.Queue[Event], with_usage: bool
) -> AsyncIterator[str]:
    """The chunks of a plain completion."""
    offset = 0
    while True:
        event = await events.get()
        if isinstance(event, Failed):
            yield _failed_event(event.error)
            return
        text, logprobs, reason = "", None, None
        if isinstance(event, Piece):
            text = event.text
            if event.logprobs:
                logprobs = bodies.completion_logprobs(token_bytes, event.logprobs, offset)
            offset += len(text)
        else:
            reason = event.finish_reason
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}
        yield _event({**head, "choices": [choice]})
        if isinstance(event, Done):
            if with_usage:
                yield _event({**head, "choices": [], **bodies.ending(event)})
            yield "data: [DONE]\n\n"
            return


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def _failed_event(error: Exception) -> str:
    found = http_error(error)
    return _event(bodies.error_body(found.status, str(found), found.field, found.code))
