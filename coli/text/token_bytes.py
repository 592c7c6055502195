"""Token id -> the exact bytes it stands for, by the rules of the tokenizer's decoder.

Byte-level BPE maps each symbol back to its byte; SentencePiece kinds turn the metaspace into a space and `<0xNN>` into
that byte. Added tokens are their own text. What the whole-text decoder would strip at the very beginning is kept:
bytes of a sequence are always the bytes of its ids, one after another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from coli.errors import TokenizerError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

Step = Callable[[str | bytes], str | bytes]


def _byte_symbols() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: printable Latin-1 stays, the rest moves to U+0100 onwards."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = {chr(byte): byte for byte in kept}
    moved = (byte for byte in range(256) if byte not in symbols.values())
    symbols.update({chr(0x100 + i): byte for i, byte in enumerate(moved)})
    return symbols


BYTE_SYMBOLS = _byte_symbols()


def token_decoder(decoder_json: bytes | None, where: str) -> Callable[[str], bytes]:
    """Function from a vocabulary entry to its bytes, for the `decoder` part of a tokenizer.json.

    decoder_json: the decoder as JSON, None when the file has none (entries then stand for their own text).
    Raises TokenizerError naming `where` and the decoder kind when the kind is unknown.
    """
    steps = _steps(json.loads(decoder_json), where) if decoder_json is not None else []

    def to_bytes(entry: str) -> bytes:
        value: str | bytes = entry
        for step in steps:
            value = step(value)
        return value if isinstance(value, bytes) else value.encode("utf-8", "replace")

    return to_bytes


def _steps(decoder: dict[str, Any], where: str) -> list[Step]:
    kind = decoder.get("type")
    if kind == "Sequence":
        parts = decoder["decoders"]
        fused = [i for i, part in enumerate(parts) if part.get("type") == "Fuse"]
        # Behind Fuse a decoder sees the whole text; only Strip occurs there, and it trims the start of a text.
        each = parts[: fused[0]] if fused else parts
        return [step for part in each for step in _steps(part, where)]
    if kind == "ByteLevel":
        return [_from_symbols]
    if kind == "ByteFallback":
        return [_from_byte_token]
    if kind == "Metaspace":
        return [_replace(decoder["replacement"], " ")]
    if kind == "Replace" and "String" in decoder["pattern"]:
        return [_replace(decoder["pattern"]["String"], decoder["content"])]
    if kind == "Strip":
        return [_strip(decoder["content"], decoder["start"], decoder["stop"])]
    if kind == "Fuse":
        return []
    raise TokenizerError(f"{where}: decoder {kind!r} is not supported; supported: ByteLevel and SentencePiece kinds")


def _from_symbols(entry: str | bytes) -> str | bytes:
    if isinstance(entry, bytes):
        return entry
    try:
        return bytes(BYTE_SYMBOLS[symbol] for symbol in entry)
    except KeyError:
        return entry.encode("utf-8", "replace")


def _from_byte_token(entry: str | bytes) -> str | bytes:
    match = _BYTE_TOKEN.fullmatch(entry) if isinstance(entry, str) else None
    return bytes([int(match[1], 16)]) if match else entry


def _replace(old: str, new: str) -> Step:
    return lambda entry: entry.replace(old, new) if isinstance(entry, str) else entry


def _strip(content: str, start: int, stop: int) -> Step:
    def strip(entry: str | bytes) -> str | bytes:
        if isinstance(entry, bytes):
            return entry
        for _ in range(min(start, len(entry))):
            entry = entry.removeprefix(content)
        for _ in range(min(stop, len(entry))):
            entry = entry.removesuffix(content)
        return entry

    return strip
