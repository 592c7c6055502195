"""Tool calls in an answer's text: the spellings models were trained on, back to names and arguments.

Known: `<tool_call>{...}</tool_call>` (Hermes, Qwen), `[TOOL_CALLS][...]` (Mistral), a channel `to=functions.name`
(Harmony), and an answer that is one JSON object naming a tool (Llama). Text that is none of these stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from coli.text import harmony

_TAGGED = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_LISTED = re.compile(r"^\s*\[TOOL_CALLS\]\s*(\[.*\])\s*$", re.DOTALL)
OPENINGS = ("<tool_call>", "[TOOL_CALLS]", harmony.CHANNEL)


@dataclass(frozen=True, slots=True)
class Call:
    """One call; `arguments` is JSON text."""

    name: str
    arguments: str


def parse_calls(text: str, names: Collection[str]) -> tuple[str, list[Call]]:
    """(text outside the calls, the calls); no calls unless every one names a tool of `names`."""
    tagged = _TAGGED.findall(text)
    if tagged:
        calls = [_call(_json(body), names) for body in tagged]
        rest = _TAGGED.sub("", text).strip()
    elif listed := _LISTED.match(text):
        found = _json(listed[1])
        calls, rest = [_call(each, names) for each in found] if isinstance(found, list) else [None], ""
    elif channels := list(harmony.parts(text)):
        calls = [_call({"name": name, "arguments": arguments}, names) for name, arguments in harmony.calls(channels)]
        rest = harmony.said(channels)
    else:
        calls, rest = [_call(_json(text), names)], ""
    good = [call for call in calls if call is not None]
    return (rest, good) if good and len(good) == len(calls) else (text, [])


def certain_text(text: str) -> int:
    """How many characters of an unfinished answer cannot be part of a call any more."""
    stripped = text.lstrip()
    if stripped.startswith(("{", "[")) or not stripped:
        return 0
    at = min((found for found in (text.find(opening) for opening in OPENINGS) if found >= 0), default=len(text))
    if at < len(text):
        return at
    for opening in OPENINGS:
        for length in range(min(len(opening) - 1, len(text)), 0, -1):
            if text.endswith(opening[:length]):
                at = min(at, len(text) - length)
                break
    return at


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call(found: Any, names: Collection[str]) -> Call | None:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str) or found["name"] not in names:
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):
        return Call(found["name"], arguments)
    return Call(found["name"], json.dumps(arguments, ensure_ascii=False))
