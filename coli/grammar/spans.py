"""Bytes -> the tokens a model would emit for them: encoded behind the last tokens, checked, cut where it is unsure.

A tail that a longer vocabulary token could absorb together with what may follow is held back, and so is half a
character. Pure but for memo tables; knows a tokenizer only as the protocol below.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from typing import Protocol

CONTEXT_TOKENS = 4
MEMO_SIZE = 4096
_TAIL_TOKENS = 8  # a token longer than the last 8 together is not looked for


class SpanTokenizer(Protocol):
    """What is needed of a tokenizer; `encode` adds nothing and reads no special tokens."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_ids(self) -> Collection[int]: ...

    def encode(self, text: str) -> Sequence[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class Vocabulary:
    """All ordinary tokens' bytes in order: answers which bytes may follow a prefix within one token."""

    def __init__(self, tokenizer: SpanTokenizer) -> None:
        special = frozenset(tokenizer.special_ids)
        entries = {
            tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size) if token_id not in special
        }
        entries.discard(b"")
        self._entries = sorted(entries)
        self.longest = max(map(len, entries), default=0)
        self._memo: dict[bytes, int] = {}

    def next_bytes(self, prefix: bytes) -> int:
        """Set (bit b for byte b) of the bytes that follow `prefix` in longer tokens."""
        found = self._memo.get(prefix)
        if found is not None:
            return found
        entries, length = self._entries, len(prefix)
        byte_set = 0
        index = bisect_right(entries, prefix)
        while index < len(entries) and entries[index].startswith(prefix):
            byte = entries[index][length]
            byte_set |= 1 << byte
            if byte == 0xFF:
                break
            index = bisect_left(entries, prefix + bytes([byte + 1]), index)
        if len(self._memo) >= MEMO_SIZE:
            self._memo.clear()
        self._memo[prefix] = byte_set
        return byte_set


class SpanEncoder:
    """Encodes spans for one tokenizer; results are remembered by context, span and what may follow."""

    def __init__(self, tokenizer: SpanTokenizer, vocabulary: Vocabulary | None = None) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary if vocabulary is not None else Vocabulary(tokenizer)
        self._special = frozenset(tokenizer.special_ids)
        self._memo: dict[tuple[tuple[int, ...], bytes, int], tuple[int, ...]] = {}

    def encode(self, context_ids: Sequence[int], span: bytes, may_follow: int) -> tuple[int, ...]:
        """Ids whose bytes are a prefix of `span`, possibly none.

        context_ids: the ids before it; only the last CONTEXT_TOKENS matter. may_follow: set of the bytes that may
        come behind the span.
        """
        key = (tuple(context_ids[-CONTEXT_TOKENS:]), span, may_follow)
        found = self._memo.get(key)
        if found is None:
            if len(self._memo) >= MEMO_SIZE:
                self._memo.clear()
            found = self._memo[key] = self._encode(key[0], span, may_follow)
        return found

    def _encode(self, context_ids: tuple[int, ...], span: bytes, may_follow: int) -> tuple[int, ...]:
        usable = 0
        while usable < len(context_ids) and self._is_text(context_ids[-1 - usable]):
            usable += 1
        for num_context in dict.fromkeys((usable, min(1, usable), 0)):
            context = b"".join(map(self._tokenizer.token_bytes, context_ids[len(context_ids) - num_context :]))
            pieces = self._behind(context, span)
            if pieces is not None:
                return self._hold_back(context, pieces, span, may_follow)
        return ()

    def _is_text(self, token_id: int) -> bool:
        return token_id >= 0 and token_id not in self._special

    def _behind(self, context: bytes, span: bytes) -> list[tuple[int, bytes]] | None:
        """(id, bytes) of the span's tokens when encoded behind `context`; None if no token boundary lies between."""
        lead = 0
        while lead < min(3, len(context)) and context[lead] & 0xC0 == 0x80:
            lead += 1  # the window may open inside a character
        joined = (context + span)[lead:]
        text = _valid_prefix(joined)
        if len(text.encode()) <= len(context) - lead:
            return None
        ids = self._tokenizer.encode(text)
        pieces = [(token_id, self._tokenizer.token_bytes(token_id)) for token_id in ids]
        spelled = b"".join(piece for _, piece in pieces)
        wanted = text.encode()
        if not spelled.endswith(wanted):  # a prefix space may be added in front; anything else is no round trip
            return None
        offset = len(spelled) - len(wanted) + len(context) - lead
        position = 0
        for index, (_, piece) in enumerate(pieces):
            if position == offset:
                return pieces[index:]
            position += len(piece)
        return None

    def _hold_back(
        self, context: bytes, pieces: list[tuple[int, bytes]], span: bytes, may_follow: int
    ) -> tuple[int, ...]:
        covered = sum(len(piece) for _, piece in pieces)
        if covered < len(span):  # the rest is not UTF-8 (yet): what follows is known, but not as tokens
            may_follow = 1 << span[covered]
        keep = len(pieces)
        tail = b""
        for index in range(len(pieces) - 1, max(len(pieces) - 1 - _TAIL_TOKENS, -1), -1):
            tail = pieces[index][1] + tail
            if len(tail) > self._vocabulary.longest:
                break
            if self._vocabulary.next_bytes(tail) & may_follow:
                keep = index
        while keep and ends_inside_character(context + b"".join(piece for _, piece in pieces[:keep])):
            keep -= 1
        return tuple(token_id for token_id, _ in pieces[:keep])


def _valid_prefix(data: bytes) -> str:
    """The longest beginning of `data` that is UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode()


def ends_inside_character(data: bytes) -> bool:
    """Whether `data` ends in an unfinished UTF-8 character."""
    for length in range(1, min(4, len(data)) + 1):
        byte = data[-length]
        if byte & 0xC0 == 0x80:
            continue
        needed = 1 if byte < 0xC0 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
        return length < needed
    return False
