"""The file of an n-gram index: a plain safetensors file that is mapped, never read as a whole.

Fixes names, types and order of its arrays and what its header says; checks all of that at open, in milliseconds.
Built by coli.tools.index_build; searched by coli.drafts.ngram_index.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coli.errors import CorpusError
from coli.impostors import open_regular

FORMAT = "coli n-gram index"
VERSION = 3  # 2 had ids of four bytes
DEPTH = 10  # ids the order is sorted by, and separators in front of the tokens
MAX_TOKENS = (1 << 32) - 1
SEARCHED_BYTES = 64_000_000  # of a larger file that stay in the page cache; a search touches some 24 pages
TOKEN_BYTES, SEPARATOR = 3, 0xFFFFFF
HEADER_BYTES = 1 << 16
STRIDE, SAMPLED = 256, 4  # of the directory
# in file order; tokens are padded with separators, one at least, so that every 8-byte array begins at a multiple of 8
ARRAYS: Mapping[str, str] = {
    "positions": "U32",  # (m,) positions that follow at least one id, sorted by the ids before them, read backwards
    "tokens": "U8",  # (3 n,) ids of 3 bytes, low one first; all ones between documents, DEPTH of them in front
    "directory": "I32",  # (ceil(m / 256) * 4,) the last 4 ids before every 256th sorted position, newest first
    "first": "I64",  # (vocab_size + 1,) range of the positions behind each id
    "heavy.keys": "I64",  # (h,) start << 4 | order of the contexts seen at least 256 times
    "heavy.first": "I64",  # (h + 1,) range of their successors in ids and counts
    "documents.start": "I64",  # (d,) index in tokens of each document's first id
    "documents.offset": "I64",  # (d,) byte in its source at which the document begins
    "documents.source": "I32",  # (d,) index in the list of source names
    "heavy.latest": "U32",  # (h,) highest position of each
    "heavy.types": "U32",  # (h,) distinct successors
    "heavy.entropy": "F32",  # (h,) of the successors, nats
    "heavy.ids": "I32",  # (e,) the 256 most frequent successors
    "heavy.counts": "U32",  # (e,)
    "sources": "U8",  # JSON list of [name, kind] of the sources
}
DTYPES: Mapping[str, np.dtype[Any]] = {
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "I64": np.dtype("<i8"),
    "F32": np.dtype("<f4"),
    "U8": np.dtype("u1"),
}


class Source(NamedTuple):
    """An input: its name and how it was read (coli.tools.corpus_inputs.KINDS)."""

    name: str
    kind: str


def packed_ids(ids: NDArray[np.int32]) -> NDArray[np.uint8]:
    """ids (n,), negative between documents, as bytes (3 n,)."""
    return np.ascontiguousarray(ids, "<i4").view(np.uint8).reshape(-1, 4)[:, :TOKEN_BYTES].ravel()


def unpacked_ids(tokens: NDArray[np.uint8]) -> NDArray[np.int32]:
    """What `packed_ids` was given, separators as -1."""
    bits = np.zeros((len(tokens) // TOKEN_BYTES, 4), np.uint8)
    bits[:, :TOKEN_BYTES] = tokens.reshape(-1, TOKEN_BYTES)
    ids: NDArray[np.int32] = bits.view("<i4").ravel()
    ids[ids == SEPARATOR] = -1
    return ids


@dataclass(frozen=True, slots=True)
class IndexHeader:
    """What the metadata of an index says.

    vocab_size: ids are below it; tokenizer: fingerprint of the tokenizer that made the ids; max_order: longest context
    that is drafted from; span_files: whether n-grams may cross documents; prune: pairs of ids seen less often are left
    out; num_ids, num_documents; contexts: distinct contexts of 1, 2 .. max_order ids; digest: SHA-256 of the arrays.
    """

    vocab_size: int
    tokenizer: str
    max_order: int
    span_files: bool
    prune: int
    num_ids: int
    num_documents: int
    contexts: tuple[int, ...]
    digest: str


def header_bytes(header: IndexHeader, lengths: Mapping[str, int]) -> bytes:
    """The first HEADER_BYTES bytes of the file: length prefix, JSON table, spaces."""
    index = json.dumps(asdict(header), sort_keys=True)
    notes = {"format": FORMAT, "version": str(VERSION), "index": index, "header_digest": _seal(index, lengths)}
    table: dict[str, object] = {"__metadata__": notes}
    at = 0
    for name, dtype in ARRAYS.items():
        end = at + lengths[name] * DTYPES[dtype].itemsize
        table[name] = {"dtype": dtype, "shape": [lengths[name]], "data_offsets": [at, end]}
        at = end
    text = json.dumps(table, separators=(",", ":")).encode()
    return (HEADER_BYTES - 8).to_bytes(8, "little") + text.ljust(HEADER_BYTES - 8)


def _seal(index: str, lengths: Mapping[str, int]) -> str:
    """SHA-256 of what the header says: it is not among the arrays that `digest` covers."""
    return hashlib.sha256(json.dumps([index, [lengths[name] for name in ARRAYS]]).encode()).hexdigest()


def looks_like_an_index(path: Path) -> bool:
    """Whether the file begins as safetensors files do; a corpus of the seed is text. False if it cannot be read."""
    try:
        with open_regular(path) as file:
            start = file.read(9)
    except OSError:
        return False
    return len(start) == 9 and start[8:] == b"{" and int.from_bytes(start[:8], "little") < 1 << 40


def open_index(path: Path) -> tuple[IndexHeader, dict[str, NDArray[Any]]]:
    """Map an index. Raises CorpusError naming the file and what is wrong with it.

    The arrays are views of the mapping; their values are not checked here (searches bring them into range).
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(HEADER_BYTES)
            _refuse_others(path, start)
            header, lengths, end = _parse(path, start)
            if size != HEADER_BYTES + end:
                fault = "cut short" if size < HEADER_BYTES + end else "too long"
                raise CorpusError(f"{path}: {fault}: expected {HEADER_BYTES + end} bytes, found {size}; build it again")
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read: {error.strerror or error}") from None
    if size > SEARCHED_BYTES and hasattr(mmap, "MADV_RANDOM"):
        mapping.madvise(mmap.MADV_RANDOM)  # searches touch single pages; of a smaller file all, the sooner the better
    arrays: dict[str, NDArray[Any]] = {}
    at = HEADER_BYTES
    for name, dtype in ARRAYS.items():
        arrays[name] = np.frombuffer(mapping, DTYPES[dtype], lengths[name], at)
        at += arrays[name].nbytes
    return header, arrays


def _refuse_others(path: Path, start: bytes) -> None:
    """Name the kinds of file that are likely to be offered by mistake."""
    if start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        raise CorpusError(f"{path}: a pickle, which could run code; build an index with `coli graph build` instead")
    if len(start) < 9 or start[8:9] != b"{" or int.from_bytes(start[:8], "little") > 1 << 40:
        raise CorpusError(f"{path}: not an n-gram index; build one with `coli graph build` or `coli corpus build`")


def _parse(path: Path, start: bytes) -> tuple[IndexHeader, dict[str, int], int]:
    """(header, array lengths, bytes of data) from the first bytes of the file."""
    if len(start) < HEADER_BYTES:
        raise CorpusError(f"{path}: header cut short: expected {HEADER_BYTES} bytes, found {len(start)}")
    try:
        table = json.loads(start[8 : int.from_bytes(start[:8], "little") + 8])
        notes = table["__metadata__"]
        kind, version = notes["format"], notes["version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CorpusError(f"{path}: a safetensors file, but no n-gram index; `coli graph build` makes one") from None
    if kind != FORMAT:
        raise CorpusError(f"{path}: format {kind!r}, expected {FORMAT!r}")
    if version != str(VERSION):
        raise CorpusError(f"{path}: index version {version!r}, this coli reads {VERSION}; build it again")
    index = notes.get("index")
    header = _header(path, index)
    lengths: dict[str, int] = {}
    at = 0
    for name, dtype in ARRAYS.items():
        entry = table.get(name)
        length = entry["shape"][0] if _is_vector(entry) else -1
        end = at + length * DTYPES[dtype].itemsize
        if length < 0 or entry != {"dtype": dtype, "shape": [length], "data_offsets": [at, end]}:
            raise CorpusError(f"{path}: array {name}: expected {dtype} in one dimension at byte {at}, found {entry}")
        lengths[name] = length
        at = end
    _check_lengths(path, header, lengths)
    _check_counts(path, header, lengths)
    if notes.get("header_digest") != _seal(index, lengths):
        raise CorpusError(f"{path}: damaged: its header does not have the digest in it; build it again")
    return header, lengths, at


def _is_vector(entry: object) -> bool:
    if not isinstance(entry, dict):
        return False
    shape = entry.get("shape")
    return isinstance(shape, list) and len(shape) == 1 and type(shape[0]) is int and 0 <= shape[0] < 1 << 40


def _header(path: Path, text: object) -> IndexHeader:
    try:
        values = json.loads(text) if isinstance(text, str) else None
        assert isinstance(values, dict)
        values["contexts"] = tuple(values["contexts"])
        header = IndexHeader(**values)
        for field in fields(IndexHeader):
            wanted = {"int": int, "str": str, "bool": bool}.get(str(field.type), tuple)
            assert type(getattr(header, field.name)) is wanted
        assert all(type(count) is int for count in header.contexts)
    except (ValueError, KeyError, TypeError, AssertionError, RecursionError):
        raise CorpusError(f"{path}: the metadata `index` is not what this version writes; build it again") from None
    if not (0 < header.vocab_size <= SEPARATOR and 1 <= header.max_order <= DEPTH):
        raise CorpusError(
            f"{path}: vocabulary of {header.vocab_size}, order {header.max_order}: expected orders 1..{DEPTH}"
        )
    return header


def _check_lengths(path: Path, header: IndexHeader, lengths: Mapping[str, int]) -> None:
    heavy, documents = lengths["heavy.keys"], lengths["documents.start"]
    expected = {
        "directory": -(-lengths["positions"] // STRIDE) * SAMPLED,
        "first": header.vocab_size + 1,
        "heavy.first": heavy + 1,
        "heavy.latest": heavy,
        "heavy.types": heavy,
        "heavy.entropy": heavy,
        "heavy.counts": lengths["heavy.ids"],
        "documents.source": documents,
        "documents.offset": documents,
    }
    for name, length in expected.items():
        if lengths[name] != length:
            raise CorpusError(f"{path}: array {name}: expected {length} values, found {lengths[name]}")
    tokens, rest = divmod(lengths["tokens"], TOKEN_BYTES)
    if rest or not DEPTH < tokens <= MAX_TOKENS or not 0 < lengths["positions"] < tokens:
        raise CorpusError(
            f"{path}: {lengths['tokens']} bytes of tokens and {lengths['positions']} positions do not fit"
        )


def _check_counts(path: Path, header: IndexHeader, lengths: Mapping[str, int]) -> None:
    """What the arrays' lengths say about the counts in the header; the exact ones need the whole file."""
    most = lengths["positions"]
    counts = {
        "num_ids": (header.num_ids, most + 1, lengths["tokens"] // TOKEN_BYTES - DEPTH - 1),
        "num_documents": (header.num_documents, lengths["documents.start"], lengths["documents.start"]),
        "prune": (header.prune, 0, None),
        "number of orders": (len(header.contexts), header.max_order, header.max_order),
        "contexts of order 1": (header.contexts[0] if header.contexts else 0, 1, min(most, header.vocab_size)),
        **{f"contexts of order {order}": (n, 0, most) for order, n in enumerate(header.contexts[1:], 2)},
    }
    for name, (found, least, largest) in counts.items():
        if found < least or (largest is not None and found > largest):
            expected = f"{least}.." if largest is None else f"{least}" if least == largest else f"{least}..{largest}"
            raise CorpusError(f"{path}: header: {name} {found}, expected {expected}; build it again")
