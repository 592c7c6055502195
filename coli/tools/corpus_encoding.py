"""Text of any length to token ids, in pieces, with the very ids that one encoding of the whole would give.

A piece ends only where the tokenizer itself would have cut: before the first letter of a line, checked on the text
around it. Where no such place is found (tokenizers that do not cut at line ends) the piece grows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Protocol

PIECE_CHARS = 1 << 19
_WINDOW = 400  # characters on each side that are encoded to check a cut
_CUT = re.compile(r"\n(?=[^\W\d_])")
_TRIES = 8


class Encoder(Protocol):
    """coli.text.Tokenizer, as far as an index needs it."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...

    def encode(self, text: str, special: bool = False) -> list[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


def encoded(pieces: Iterable[str], encoder: Encoder, piece_chars: int = PIECE_CHARS) -> Iterator[tuple[list[int], int]]:
    """(ids, bytes of the text they stand for) of what `pieces` add up to, special tokens' names being ordinary text.

    piece_chars: characters gathered before a cut is looked for; it changes memory and speed, never the ids.
    """
    pending = ""
    wanted = piece_chars
    for piece in pieces:
        pending += piece
        while len(pending) >= wanted:
            cut = _safe_cut(pending, wanted, encoder)
            if cut is None:
                wanted *= 2
                continue
            yield _piece(pending[:cut], encoder)
            pending = pending[cut:]
            wanted = piece_chars
    if pending:
        yield _piece(pending, encoder)


def _piece(text: str, encoder: Encoder) -> tuple[list[int], int]:
    return encoder.encode(text), len(text.encode("utf-8", "surrogatepass"))


def _safe_cut(text: str, limit: int, encoder: Encoder) -> int | None:
    """The last place before `limit` at which left and right encode as they do together, or None."""
    cuts = [match.end() for match in _CUT.finditer(text, max(0, limit - 8 * _WINDOW), limit)]
    for cut in reversed(cuts[-_TRIES:]):
        left, right = text[max(0, cut - _WINDOW) : cut], text[cut : cut + _WINDOW]
        if cut < len(text) and encoder.encode(left) + encoder.encode(right) == encoder.encode(left + right):
            return cut
    return None
