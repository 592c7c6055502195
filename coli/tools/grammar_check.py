"""Explains a grammar: what it holds, what it forces in a given text, and which tokens would be drafted for it.

What `coli grammar check` calls. Needs a tokenizer only for the tokens; no model is run: the text plays the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coli.drafts.base import DraftSource
from coli.drafts.grammar import DEFAULT_DEPTH, GrammarLibrary
from coli.grammar.automaton import Automaton
from coli.grammar.load import GRAMMAR_TAG, LoadedGrammar, load_grammar
from coli.grammar.matcher import Position
from coli.grammar.spans import SpanTokenizer

FORCED, FREE, SKIPPED, ILLEGAL = "=", ".", " ", "!"


@dataclass(frozen=True, slots=True)
class DraftedStep:
    """One forward: the text of the token before, the drafted tokens' texts, how many of them were right."""

    behind: str
    drafted: tuple[str, ...]
    accepted: int


@dataclass(frozen=True, slots=True)
class Replay:
    """What drafting from the grammar alone would do if the target emitted exactly the given tokens."""

    num_tokens: int
    forwards: int
    proposed: int
    accepted: int
    steps: tuple[DraftedStep, ...]

    @property
    def tokens_per_forward(self) -> float:
        return self.num_tokens / self.forwards if self.forwards else 0.0


@dataclass(frozen=True, slots=True)
class GrammarCheck:
    """Findings. first_bytes, forced_at_start: how the grammar begins; marks: one of FORCED, FREE, SKIPPED or ILLEGAL
    per character of the text; complete: whether the grammar may end behind the text; None without a text."""

    loaded: LoadedGrammar
    num_states: int
    first_bytes: str
    forced_at_start: str
    text: str | None
    marks: str
    complete: bool | None
    replay: Replay | None
    overflows: int = 0  # places where the walker's limits, not the grammar, ended the walk


def check_grammar(
    path: Path,
    *,
    tag: str = GRAMMAR_TAG,
    text: str | None = None,
    tokenizer: SpanTokenizer | None = None,
    depth: int = DEFAULT_DEPTH,
) -> GrammarCheck:
    """Load a grammar or schema file and say what it does. Raises GrammarError.

    Without a tokenizer a token terminal stands for its text.
    """
    loaded = load_grammar(path, tag, tokens_as_text=tokenizer is None)
    replay = None
    if tokenizer is None:
        automaton = loaded.automaton(None)
    else:
        library = GrammarLibrary(tokenizer, lambda line: None)
        source = library.source(loaded, depth=depth, gate="always")
        automaton = source.automaton
        if text:
            replay = replay_tokens(source, tokenizer.encode(text), tokenizer)
    data = (text or "").encode("utf-8", "surrogateescape")
    marks, position = _marks(automaton, data)
    start = automaton.start
    return GrammarCheck(
        loaded=loaded,
        num_states=automaton.num_states,
        first_bytes=_byte_names(start.byte_set),
        forced_at_start=automaton.forced(start)[0].decode("utf-8", "replace"),
        text=text,
        marks=_by_character(text or "", marks),
        complete=None if text is None else position is not None and position.can_end,
        replay=replay,
        overflows=automaton.overflows,
    )


def replay_tokens(source: DraftSource, token_ids: Sequence[int], tokenizer: SpanTokenizer) -> Replay:
    """Let `source` draft along `token_ids` as the decode loop would: the first id comes from the prefill."""
    source.begin(())
    source.commit(token_ids[:1])
    position, steps, proposed, right = 1, [], 0, 0
    while position < len(token_ids):
        draft = source.propose(len(token_ids) - position - 1)  # the last id comes with its forward anyway
        drafted = draft.token_ids if draft is not None else ()
        accepted = 0
        while accepted < len(drafted) and drafted[accepted] == token_ids[position + accepted]:
            accepted += 1
        if drafted:
            source.judged(min(accepted + 1, len(drafted)), accepted)
        behind, texts = _text(tokenizer, token_ids[position - 1]), tuple(_text(tokenizer, one) for one in drafted)
        steps.append(DraftedStep(behind, texts, accepted))
        proposed += len(drafted)
        right += accepted
        emitted = token_ids[position : position + accepted + 1]
        source.commit(emitted)
        position += len(emitted)
    return Replay(len(token_ids), len(steps), proposed, right, tuple(steps))


def check_lines(check: GrammarCheck, max_steps: int = 40) -> list[str]:
    """The findings for people, one line each."""
    loaded = check.loaded
    kind = "JSON Schema" if loaded.is_schema else "GBNF"
    lines = [f"{loaded.origin}: {kind}, {len(loaded.grammar.rules)} rules, {len(loaded.program.code)} instructions"]
    if loaded.program.left_recursive:
        lines.append(f"left-recursive rules, handled: {', '.join(loaded.program.left_recursive[:20])}")
    lines += loaded.notices()
    lines.append(f"arms at: {check.first_bytes}")
    if check.forced_at_start:
        lines.append(f"forced from there: {check.forced_at_start!r}")
    if check.text is not None:
        lines += _marked_lines(check)
    if check.replay is not None:
        lines += _replay_lines(check.replay, max_steps)
    return lines


def check_facts(check: GrammarCheck) -> dict[str, Any]:
    """The findings for programs: what `coli grammar check --json` prints."""
    loaded, replay = check.loaded, check.replay
    facts: dict[str, Any] = {
        "path": loaded.origin,
        "kind": "schema" if loaded.is_schema else "gbnf",
        "gbnf": loaded.text,
        "rules": len(loaded.grammar.rules),
        "left_recursive": loaded.program.left_recursive,
        "unused": list(loaded.unused),
        "first_bytes": check.first_bytes,
        "forced_at_start": check.forced_at_start,
    }
    if check.text is not None:
        facts |= {"text": check.text, "marks": check.marks, "complete": check.complete, "overflows": check.overflows}
    if replay is not None:
        facts["drafts"] = {
            "tokens": replay.num_tokens,
            "forwards": replay.forwards,
            "tokens_per_forward": replay.tokens_per_forward,
            "proposed": replay.proposed,
            "accepted": replay.accepted,
            "steps": [
                {"behind": step.behind, "drafted": list(step.drafted), "accepted": step.accepted}
                for step in replay.steps
                if step.drafted
            ],
        }
    return facts


def _marked_lines(check: GrammarCheck) -> list[str]:
    lines = [f"marks: '{FORCED}' forced, '{FREE}' free, '{ILLEGAL}' breaks the grammar, blank passed over"]
    begin = 0
    for line in (check.text or "").splitlines(keepends=True):
        shown = "".join(
            char if char.isprintable() else "\N{SYMBOL FOR NEWLINE}" if char == "\n" else "?" for char in line
        )
        lines += [f"  {shown}", f"  {check.marks[begin : begin + len(line)].rstrip()}"]
        begin += len(line)
    counted = [sum(mark == kind for mark in check.marks) for kind in (FORCED, FREE, SKIPPED, ILLEGAL)]
    share = round(100 * counted[0] / len(check.marks)) if check.marks else 0
    lines.append(
        f"{counted[0]} of {len(check.marks)} characters forced ({share}%), {counted[1]} free, "
        f"{counted[2]} passed over, {counted[3]} break the grammar; "
        f"the grammar {'may' if check.complete else 'may not'} end here"
    )
    if check.overflows:
        lines.append(
            f"too deep or too ambiguous for the walker at {check.overflows} places: what it passed over there may well "
            "fit the grammar"
        )
    return lines


def _replay_lines(replay: Replay, max_steps: int) -> list[str]:
    drafted = [step for step in replay.steps if step.drafted]
    lines = [
        f"behind {step.behind!r}: {' '.join(map(repr, step.drafted))} ({step.accepted} of {len(step.drafted)} right)"
        for step in drafted[:max_steps]
    ]
    if len(drafted) > max_steps:
        lines.append(f"... and {len(drafted) - max_steps} more drafts")
    share = round(100 * replay.accepted / replay.proposed) if replay.proposed else 0
    return [
        *lines,
        f"grammar: {share}% acceptance ({replay.accepted}/{replay.proposed} forced drafts)",
        f"{replay.tokens_per_forward:.2f} tokens/forward ({replay.num_tokens} tokens in {replay.forwards} forwards)",
    ]


def _text(tokenizer: SpanTokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", "backslashreplace")


def _marks(automaton: Automaton, data: bytes) -> tuple[str, Position]:
    """A mark per byte, and the position behind them."""
    marks = []
    position: Position = None
    for byte in data:
        reached = automaton.step(position, byte) if position is not None else None
        if reached is not None and position is not None:
            marks.append(FORCED if position.only_byte is not None else FREE)
        else:
            illegal = position is not None and not position.can_end
            reached = automaton.step(automaton.start, byte)
            marks.append(ILLEGAL if illegal and reached is None else SKIPPED if reached is None else FREE)
        position = reached
    return "".join(marks), position


def _by_character(text: str, marks: str) -> str:
    """A mark per character: illegal if any of its bytes is, forced only if all are."""
    found = []
    begin = 0
    for char in text:
        end = begin + len(char.encode("utf-8", "surrogateescape"))
        inner = marks[begin:end]
        found.append(next((mark for mark in (ILLEGAL, SKIPPED, FREE) if mark in inner), FORCED))
        begin = end
    return "".join(found)


def _byte_names(byte_set: int) -> str:
    """The bytes of a set as ranges of printable characters and hexadecimal numbers."""
    names: list[str] = []
    byte = 0
    while byte < 256:
        if not byte_set >> byte & 1:
            byte += 1
            continue
        last = byte
        while last < 255 and byte_set >> (last + 1) & 1:
            last += 1
        names.append(_name(byte) if last == byte else f"{_name(byte)}..{_name(last)}")
        byte = last + 1
    return " ".join(names) or "no byte"


def _name(byte: int) -> str:
    return chr(byte) if 0x20 < byte < 0x7F else f"\\x{byte:02X}"
