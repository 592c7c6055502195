"""What the automaton is made of: frames (rules being matched) and states (all that may come next).

Both are immutable once made, compared by identity and may be held by anyone; `Automaton` alone makes them.
"""

from __future__ import annotations

from coli.grammar.charset import Edges

Thread = tuple[int, int, "Frame"]  # pc, count, frame
Group = tuple[int, Edges, int, "Frame"]  # bytes of all edges, edges, count, frame


class Frame:
    """One rule being matched. returns: where it goes on when it is complete; site: what identifies it coarsely."""

    __slots__ = ("depth", "places", "returns", "site")

    def __init__(self, returns: frozenset[Thread], depth: int) -> None:
        self.returns = returns
        self.depth = depth
        self.places = hash(frozenset(pc for pc, _, _ in returns))
        self.site = self.places

    def close(self) -> None:
        """Fix the site once the frames it returns to exist."""
        self.site = hash(frozenset((pc, frame.places) for pc, _, frame in self.returns))


class State:
    """What may come next after the bytes so far.

    can_end: the grammar may end here. byte_set: legal next bytes, bit b for byte b. only_byte: the one byte that must
    come, None if there is a choice, an end or a token. site: the same for states that differ only in counts and in
    frames far below, so that what was learnt in one record serves the next. next: memo of `Automaton.step`.
    """

    __slots__ = ("byte_set", "can_end", "forced", "groups", "next", "only_byte", "site", "threads", "tokens")

    def __init__(
        self, threads: frozenset[Thread], can_end: bool, groups: tuple[Group, ...], tokens: tuple[Thread, ...]
    ) -> None:
        self.threads = threads
        self.can_end = can_end
        self.groups = groups
        self.tokens = tokens
        byte_set = 0
        for group in groups:
            byte_set |= group[0]
        self.byte_set = byte_set
        single = not can_end and not tokens and byte_set and not byte_set & (byte_set - 1)
        self.only_byte = byte_set.bit_length() - 1 if single else None
        self.next: dict[int, State | None] = {}
        self.site = hash((can_end, frozenset((pc, frame.site) for pc, _, frame in threads)))
        self.forced: tuple[bytes, State] | None = None

    @property
    def must_end(self) -> bool:
        """The grammar may end here and nothing can follow."""
        return self.can_end and not self.byte_set and not self.tokens
