"""Answers in Harmony's channels (gpt-oss): what a model wrote, as the fields that its chat template takes back.

The text of such an answer holds the channels' marks, and its own template refuses a message that does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", START, "<|return|>", "<|call|>")  # of the text of one channel
_FUNCTIONS = "functions."


@dataclass(frozen=True, slots=True)
class Part:
    """What was said in one channel; `recipient`: whom a call is for, None where nobody is called."""

    channel: str
    recipient: str | None
    text: str


def parts(answer: str) -> Iterator[Part]:
    """The channels of an answer in order; none if it does not begin with one."""
    if not answer.startswith(CHANNEL):
        return
    before = ""
    for piece in answer.split(CHANNEL)[1:]:
        header, _, rest = piece.partition(MESSAGE)
        text = rest
        for end in _ENDS:
            text = text.partition(end)[0]
        words = header.split()
        # whom it is for stands behind the channel, or in front of it
        recipients = [word.removeprefix("to=") for word in (*before.split(), *words) if word.startswith("to=")]
        yield Part(words[0] if words else "", recipients[0] if recipients else None, text)
        before = rest.rpartition(START)[2] if START in rest else ""


def as_fields(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """An assistant's message with the analysis under `thinking` and what was said under `content`; calls, which have a
    field of their own, are left out. Any other message as it is."""
    answer = message.get("content")
    if message.get("role") != "assistant" or not isinstance(answer, str) or not answer.startswith(CHANNEL):
        return message
    found = list(parts(answer))
    thinking = [part.text for part in found if part.channel == "analysis"]
    fields = {"thinking": "\n".join(thinking)} if thinking else {}
    return {**message, "content": said(found), **fields}


def said(found: list[Part]) -> str:
    """What is for the user."""
    return "\n".join(part.text for part in found if part.channel != "analysis" and part.recipient is None)


def calls(found: list[Part]) -> list[tuple[str, str]]:
    """(function, arguments as text) of every call."""
    return [(part.recipient.removeprefix(_FUNCTIONS), part.text) for part in found if part.recipient is not None]
