"""The syntax tree of a grammar, as a flat arena: a node refers to its parts by index, and parts come before wholes.

The parser and the schema compiler produce it, the program compiler reads it. Flat because a grammar may nest tens of
thousands deep: every pass is a loop over indices, never a recursion.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_CODE_POINT = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)


@dataclass(frozen=True, slots=True)
class Literal:
    """Exactly these bytes; none at all is the empty match."""

    data: bytes


@dataclass(frozen=True, slots=True)
class CharClass:
    """One character out of sorted, disjoint code point ranges (both ends included), or one outside of them.

    A negated class also takes a byte that cannot begin a UTF-8 character, as the code point of its value: the seed
    negates over all 256 bytes, and a stray byte must not derail a string.
    """

    ranges: tuple[tuple[int, int], ...]
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Sequence:
    """Its parts one after another."""

    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Any one of its parts."""

    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part `low` to `high` times; high None: without limit."""

    part: int
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Reference:
    """The rule of this name; line and column (from 1) are those of the reference."""

    name: str
    line: int
    column: int


@dataclass(frozen=True, slots=True)
class TokenTerminal:
    """One token of the vocabulary, by id or by its text with the angle brackets, or any token but that one."""

    token_id: int | None
    text: str | None
    negated: bool
    line: int
    column: int

    def __str__(self) -> str:
        return ("!" if self.negated else "") + (self.text if self.text is not None else f"<[{self.token_id}]>")


Node = Literal | CharClass | Sequence | Choice | Repeat | Reference | TokenTerminal


@dataclass(frozen=True, slots=True)
class Rule:
    """A named rule: its body and where its name stands."""

    name: str
    body: int
    line: int
    column: int


@dataclass(slots=True)
class Grammar:
    """Rules over one arena; `origin` is the file name for messages, `root` the start rule."""

    origin: str
    nodes: list[Node] = field(default_factory=list)
    rules: dict[str, Rule] = field(default_factory=dict)
    root: str = "root"

    def place(self, line: int, column: int) -> str:
        """`file:line:column`, the beginning of every message."""
        return f"{self.origin}:{line}:{column}"


def merge_ranges(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Sorted, disjoint ranges that cover the same code points; a reversed range is swapped, as the seed does."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted((min(pair), max(pair)) for pair in ranges):
        if merged and low <= merged[-1][1] + 1:
            if high > merged[-1][1]:
                merged[-1] = (merged[-1][0], high)
        else:
            merged.append((low, high))
    return tuple(merged)
