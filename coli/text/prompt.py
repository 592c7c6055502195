"""Prompts as token ids: plain text, or a conversation through the model's chat template.

A user's text never becomes a special token: before rendering, the first character of every special token that a
message contains is hidden behind a private character, so only the template's own special tokens are readable
afterwards. Ordinary conversations take the usual way, encode(render(messages)), and give exactly its ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coli.text import harmony
from coli.text.chat import ChatTemplate, Message
from coli.text.tokenizer import Tokenizer


def plain_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a prompt without template: what the tokenizer puts before it (BOS), then the text, never special."""
    return [*tokenizer.prefix_ids, *tokenizer.encode(text)]


def chat_ids(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    enable_thinking: bool | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> list[int]:
    """Ids of a conversation; exactly one BOS where the tokenizer asks for one. Raises ChatTemplateError."""

    def render(messages: Any, tools: Any) -> str:
        return template.render(messages, add_generation_prompt, enable_thinking, tools, **variables)

    if harmony.CHANNEL in tokenizer.special_texts:
        messages = [harmony.as_fields(message) for message in messages]
    text = render(messages, tools)  # first of all: a refusal must be about what the user wrote
    if not _any_text(lambda part: _reaches_special(tokenizer, part), [messages, tools]):
        ids = tokenizer.encode(text, special=True)
    else:
        marks = _marks(tokenizer.special_texts, [messages, tools, template.source])
        ids = tokenizer.encode_marked(_render_marked(tokenizer, render, messages, tools, text, marks), marks)
    bos = tokenizer.prefix_ids
    return ids if not bos or tuple(ids[: len(bos)]) == bos else [*bos, *ids]


def _render_marked(
    tokenizer: Tokenizer,
    render: Callable[[Any, Any], str],
    messages: Sequence[Message],
    tools: Any,
    text: str,
    marks: dict[str, str],
) -> str:
    hidden = {original: mark for mark, original in marks.items()}

    def hide(part: str) -> str:
        return _hide(part, tokenizer.special_texts, hidden)

    tools = _map_text(hide, tools)
    everything = render(_map_text(hide, messages), tools)
    plain = everything
    for mark, original in marks.items():
        plain = plain.replace(mark, original)
    if plain == text:
        return everything
    # The template looks for special tokens in what the model said before (such as </think>): let it see those, keep
    # everybody else's words hidden.
    others = [m if m.get("role") == "assistant" else _map_text(hide, m) for m in messages]
    return render(others, tools)


def _reaches_special(tokenizer: Tokenizer, part: str) -> bool:
    """Whether `part` contains a special token, or ends with a beginning of one that other text could complete."""
    if tokenizer.has_special(part):
        return True
    ends = (part, part.rstrip())
    return any(_partial_end(end, special) is not None for end in ends for special in tokenizer.special_texts)


def _partial_end(text: str, special: str) -> int | None:
    """Where a proper beginning of `special` starts that `text` ends with, None if it does not."""
    for length in range(min(len(special) - 1, len(text)), 0, -1):
        if text.endswith(special[:length]):
            return len(text) - length
    return None


def _hide(part: str, specials: Sequence[str], hidden: Mapping[str, str]) -> str:
    starts: set[int] = set()
    for special in specials:
        at = part.find(special)
        while at >= 0:
            starts.add(at)
            at = part.find(special, at + 1)
        for end in (part, part.rstrip()):
            partial = _partial_end(end, special)
            if partial is not None:
                starts.add(partial)
    if not starts:
        return part
    return "".join(hidden[char] if i in starts else char for i, char in enumerate(part))


def _marks(specials: Sequence[str], used: object) -> dict[str, str]:
    """A private character nobody uses here for every first character of a special token."""
    seen: set[str] = set()

    def note(part: str) -> bool:
        seen.update(part)
        return False

    _any_text(note, used)
    free = (chr(code) for code in range(0x10FFFD, 0xF0000, -1) if chr(code) not in seen)
    return {mark: first for first, mark in zip(sorted({special[0] for special in specials}), free, strict=False)}


def _map_text(change: Callable[[str], str], value: Any) -> Any:
    """`value` with every text in it changed, keys and roles too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_text(change, k): _map_text(change, v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_map_text(change, item) for item in value]
    return value


def _any_text(test: Callable[[str], bool], value: Any) -> bool:
    """Whether `test` holds for some text in `value`."""
    if isinstance(value, str):
        return test(value)
    if isinstance(value, Mapping):
        return any(_any_text(test, k) or _any_text(test, v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return any(_any_text(test, item) for item in value)
    return False
