"""Code point sets as UTF-8: a character class becomes edges on bytes, with a few shared states for the bytes inside.

Byte sets are 256-bit integers (bit b set: byte b). Pure functions; the program compiler calls them.
"""

from __future__ import annotations

from collections.abc import Callable

from coli.grammar.syntax import MAX_CODE_POINT, SURROGATES, CharClass

ANY_BYTE = (1 << 256) - 1
# Bytes that cannot begin a UTF-8 character.
STRAY_BYTES = sum(1 << byte for byte in (*range(0x80, 0xC2), *range(0xF5, 0x100)))

Ranges = tuple[tuple[int, int], ...]
Edges = tuple[tuple[int, int], ...]  # (byte set, target)
AddState = Callable[[Edges], int]


def byte_set(low: int, high: int) -> int:
    """The bytes low..high, both included."""
    return (1 << (high + 1)) - (1 << low)


def complement(ranges: Ranges) -> Ranges:
    """The code points outside of sorted, disjoint `ranges`."""
    outside: list[tuple[int, int]] = []
    start = 0
    for low, high in ranges:
        if low > start:
            outside.append((start, low - 1))
        start = high + 1
    if start <= MAX_CODE_POINT:
        outside.append((start, MAX_CODE_POINT))
    return tuple(outside)


def class_edges(node: CharClass, target: int, add_state: AddState) -> Edges:
    """Byte edges that lead through one character of the class to `target`.

    add_state: makes a state out of its edges and returns its number; called for the bytes within a character.
    Surrogates have no UTF-8 and are never taken.
    """
    ranges = complement(node.ranges) if node.negated else node.ranges
    single = 0
    for low, high in _clip(ranges, 0, 0x7F):
        single |= byte_set(low, high)
    if node.negated:
        for low, high in _clip(ranges, 0x80, 0xFF):
            single |= byte_set(low, high) & STRAY_BYTES
    edges = [(single, target)] if single else []
    if not ranges or ranges[-1][1] < 0x80:
        return tuple(edges)
    tails: dict[tuple[int, Ranges], int] = {}

    def tail(num_bytes: int, inner: Ranges) -> int:
        """State before `num_bytes` continuation bytes whose joined value lies in `inner`."""
        if num_bytes == 0:
            return target
        key = (num_bytes, inner)
        if key not in tails:
            blocks = _split(inner, 6 * (num_bytes - 1))
            tails[key] = add_state(tuple((leads << 0x80, tail(num_bytes - 1, rest)) for rest, leads in blocks.items()))
        return tails[key]

    for num_bytes, lead_base, first, last in _LENGTHS:
        for inner, leads in _split(_clip(ranges, first, last), 6 * num_bytes).items():
            edges.append((leads << lead_base, tail(num_bytes, inner)))
    return tuple(edges)


# Continuation bytes, first lead byte, first and last code point of each length; surrogates left out.
_LENGTHS = (
    (1, 0xC0, 0x80, 0x7FF),
    (2, 0xE0, 0x800, SURROGATES[0] - 1),
    (2, 0xE0, SURROGATES[1] + 1, 0xFFFF),
    (3, 0xF0, 0x10000, MAX_CODE_POINT),
)


def _clip(ranges: Ranges, first: int, last: int) -> Ranges:
    return tuple((max(low, first), min(high, last)) for low, high in ranges if low <= last and high >= first)


def _split(ranges: Ranges, shift: int) -> dict[Ranges, int]:
    """Group by the bits above `shift`: ranges of what is below -> set of the leading values that have them."""
    below: dict[int, list[tuple[int, int]]] = {}
    for low, high in ranges:
        for lead in range(low >> shift, (high >> shift) + 1):
            base = lead << shift
            below.setdefault(lead, []).append((max(low - base, 0), min(high - base, (1 << shift) - 1)))
    grouped: dict[Ranges, int] = {}
    for lead, inner in below.items():
        key = tuple(inner)
        grouped[key] = grouped.get(key, 0) | 1 << lead
    return grouped
