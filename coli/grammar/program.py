"""The instructions the automaton walks, in one array over all rules; `compiler` writes them, nobody changes them.

A program counter (pc) is an index into `code`. Counted repetitions stay counters: `Loop` and `Bump` instead of copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from coli.grammar.charset import Edges
from coli.grammar.syntax import TokenTerminal


class Bytes(NamedTuple):
    """Consume one byte: each edge is (256-bit byte set, pc behind it)."""

    edges: Edges


class Split(NamedTuple):
    """Go on at any of the targets without consuming anything."""

    targets: tuple[int, ...]


class Call(NamedTuple):
    """Match a rule, then go on at `back`."""

    rule: int
    back: int


class Loop(NamedTuple):
    """Head of a counted repetition: another round while count < high, out once count >= low (then count is 0 again)."""

    low: int
    high: int | None
    body: int
    out: int


class Bump(NamedTuple):
    """A round is complete: add one to the count and go to the loop's head."""

    loop: int


class TakeToken(NamedTuple):
    """Consume one token that matches the terminal of this index."""

    terminal: int
    target: int


class End(NamedTuple):
    """The rule is matched."""


Instruction = Bytes | Split | Call | Loop | Bump | TakeToken | End
END = 0  # the pc shared by all rules


@dataclass(frozen=True, slots=True)
class First:
    """What a rule can begin with, found without consuming anything: edges, calls (rule, back), pcs of tokens."""

    byte_set: int
    edges: Edges
    calls: tuple[tuple[int, int], ...]
    tokens: tuple[int, ...]


@dataclass(slots=True)
class Program:
    """Everything the automaton needs. Lists by pc: `code`, `thresholds`; by rule: the rest up to `terminals`.

    thresholds[pc]: inside a counted repetition, the count from which on a lower count allows all a higher one does;
    None elsewhere. order[rule]: callers before callees at the left edge. cycles[rule]: group of mutually
    left-recursive rules, None for all others; members[cycle]: its rules. entry: pc of the call of the root rule.
    """

    code: list[Instruction]
    thresholds: list[int | None]
    names: list[str]
    starts: list[int]
    nullable: list[bool]
    firsts: list[First]
    order: list[int]
    cycles: list[int | None]
    members: list[list[int]]
    terminals: list[TokenTerminal]
    entry: int

    @property
    def left_recursive(self) -> list[str]:
        """Names of the rules that call themselves before consuming anything."""
        return [name for name, cycle in zip(self.names, self.cycles, strict=True) if cycle is not None]
