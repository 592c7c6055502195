"""A stream of token ids -> a stream of text, never half a character.

Holds back the bytes of an unfinished UTF-8 character until it is complete. All pieces joined equal the bytes of all
ids decoded at once. One per answer, used by one thread.
"""

from __future__ import annotations

import codecs
from typing import Protocol


class TokenBytes(Protocol):
    """Who knows the bytes of an id."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one id."""


class ByteDecoder:
    """push bytes, get text; what is not UTF-8 becomes U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, data: bytes) -> str:
        """Text that is complete now that `data` follows; may be empty."""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """End of the stream: U+FFFD for an unfinished character, else nothing."""
        return self._decoder.decode(b"", final=True)


class Detokenizer:
    """push ids, get text; what is not UTF-8 becomes U+FFFD."""

    def __init__(self, tokenizer: TokenBytes):
        self._token_bytes = tokenizer.token_bytes
        self._decoder = ByteDecoder()

    def push(self, token_id: int) -> str:
        """Text that is complete now that `token_id` follows; may be empty."""
        return self._decoder.push(self._token_bytes(token_id))

    def flush(self) -> str:
        """End of the stream: U+FFFD for an unfinished character, else nothing."""
        return self._decoder.flush()
