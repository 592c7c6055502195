"""One GGUF file: its header checked before anything is allocated or sliced, and reads of its tensors' bytes.

Versions 2 and 3, little-endian. Every count and length is held against caps and against the bytes the file has left;
tensors must be aligned, inside the file and must not overlap. Reads are pread into fresh memory, as for safetensors.
Every refusal is a one-line CheckpointError; what keys and tensors mean is not known here.
"""

import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, Self, TypeAlias

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType
from numpy.typing import NDArray

from coli.errors import CheckpointError
from coli.impostors import open_regular
from coli.store.safetensors_file import read_exactly
from coli.store.strict_json import refuse_impostor

Scalar: TypeAlias = int | float | bool | str
Value: TypeAlias = Scalar | list[Scalar]

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_KEY_BYTES = (1 << 16) - 1  # as the format says
MAX_NAME_BYTES = 1 << 10
MAX_STRING_BYTES = 64 << 20  # a whole tokenizer.json may be one value
MAX_ARRAY_LENGTH = 1 << 24
MAX_HEADER_BYTES = 1 << 30
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
VERSIONS = (2, 3)
_CHUNK = 1 << 20

_DOWNLOAD_AGAIN = "download the file again"
_LEGACY_MAGIC = (b"lmgg", b"fmgg", b"tjgg", b"algg")  # ggml, ggmf, ggjt, ggla as little-endian words
_SCALARS: Mapping[GGUFValueType, str] = {
    GGUFValueType.UINT8: "<u1", GGUFValueType.INT8: "<i1", GGUFValueType.UINT16: "<u2", GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4", GGUFValueType.INT32: "<i4", GGUFValueType.FLOAT32: "<f4", GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8", GGUFValueType.INT64: "<i8", GGUFValueType.FLOAT64: "<f8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensorInfo:
    """One tensor of a file: shape with the rows' axis last, bytes start..end of the file."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the last axis."""
        block, size = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block * size


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A checked header."""

    path: Path
    version: int
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensorInfo]
    file_bytes: int


class GgufFile:
    """An open, checked GGUF file. Reads may come from several threads."""

    def __init__(self, path: Path) -> None:
        self.header = read_header(path)
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None

    def read_rows(self, tensor: GgufTensorInfo, start: int, stop: int) -> NDArray[np.uint8]:
        """The raw bytes of rows start..stop-1 of `tensor`, (rows, row_bytes)."""
        buffer = np.empty((stop - start, tensor.row_bytes), np.uint8)
        offset = tensor.start + start * tensor.row_bytes
        assert tensor.start <= offset <= offset + buffer.nbytes <= tensor.end
        read_exactly(self._descriptor, buffer.reshape(-1).data, offset, self.header.path)
        return buffer

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_header(path: Path) -> GgufHeader:
    """Read and check the header of the file at `path`; CheckpointError names the file, the field and the fault."""
    try:
        with open_regular(path) as file:
            file_bytes = os.fstat(file.fileno()).st_size
            refuse_impostor(path, file.read(128))
            file.seek(0)
            return _parse(_Cursor(path, file, file_bytes))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None


class _Cursor:
    """Takes a header apart front to back; nothing is read that the file does not have or that exceeds its cap."""

    def __init__(self, path: Path, file: BinaryIO, file_bytes: int) -> None:
        self.path = path
        self.file_bytes = file_bytes
        self.position = 0
        self._file = file
        self._buffer = b""
        self._used = 0

    @property
    def left(self) -> int:
        return self.file_bytes - self.position

    def take(self, nbytes: int, what: str) -> bytes:
        if nbytes > self.left:
            raise CheckpointError(
                f"{self.path}: header cut short at {what}: {self.position + nbytes} bytes needed,"
                f" found {self.file_bytes}: {_DOWNLOAD_AGAIN}"
            )
        if self.position + nbytes > MAX_HEADER_BYTES:
            raise CheckpointError(f"{self.path}: header larger than {MAX_HEADER_BYTES} bytes at {what}: damaged file")
        if self._used + nbytes > len(self._buffer):
            rest = self._buffer[self._used :]
            self._buffer = rest + self._file.read(max(_CHUNK, nbytes - len(rest)))
            self._used = 0
            if len(self._buffer) < nbytes:
                raise CheckpointError(f"{self.path}: header cut short at {what} while it was read: {_DOWNLOAD_AGAIN}")
        self.position += nbytes
        self._used += nbytes
        return self._buffer[self._used - nbytes : self._used]

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def count(self, what: str, cap: int, item_bytes: int) -> int:
        """A 64-bit count of items that take at least `item_bytes` each."""
        count = self.u64(what)
        if count > cap:
            raise CheckpointError(f"{self.path}: {what} is {count}, more than {cap}: damaged file")
        if count * item_bytes > self.left:
            raise CheckpointError(
                f"{self.path}: {what} is {count}, at least {count * item_bytes} bytes, but only {self.left} follow:"
                f" cut short or damaged, {_DOWNLOAD_AGAIN}"
            )
        return count

    def name(self, what: str, cap: int) -> str:
        """A string that messages may show."""
        name = self.text(what, cap)
        if not name.isprintable():
            raise CheckpointError(f"{self.path}: {what} is not printable: {name[:40]!r}: damaged file")
        return name

    def text(self, what: str, cap: int) -> str:
        length = self.u64(what)
        if length > cap:
            raise CheckpointError(f"{self.path}: {what} is {length} bytes long, more than {cap}: damaged file")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {what} is not UTF-8 text (byte {error.start}): damaged file") from None


def _parse(cursor: _Cursor) -> GgufHeader:
    version = _version(cursor)
    tensor_count = cursor.count("tensor count", MAX_TENSORS, 8 + 4 + 8 + 4 + 8)
    key_count = cursor.count("key count", MAX_KEYS, 8 + 4 + 1)
    metadata: dict[str, Value] = {}
    for number in range(key_count):
        key = cursor.name(f"key {number}", MAX_KEY_BYTES)
        if key in metadata:
            raise CheckpointError(f"{cursor.path}: key {key!r} appears twice")
        metadata[key] = _value(cursor, key)
    alignment = _alignment(cursor.path, metadata)
    raw = [_tensor(cursor, number) for number in range(tensor_count)]
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensorInfo] = {}
    for name, kind, shape, offset in raw:
        if name in tensors:
            raise CheckpointError(f"{cursor.path}: tensor {name} appears twice")
        if offset % alignment:
            raise CheckpointError(f"{cursor.path}: tensor {name}: offset {offset} is no multiple of {alignment}")
        start = data_start + offset
        tensors[name] = GgufTensorInfo(name, kind, shape, start, start + _nbytes(kind, shape))
    _check_places(cursor, tensors.values())
    return GgufHeader(cursor.path, version, metadata, tensors, cursor.file_bytes)


def _version(cursor: _Cursor) -> int:
    magic = cursor.take(4, "magic")
    if magic != b"GGUF":
        if magic in _LEGACY_MAGIC:
            raise CheckpointError(f"{cursor.path}: a GGML file from before GGUF, expected GGUF: convert the original")
        raise CheckpointError(f"{cursor.path}: not a GGUF file: starts with {magic!r}, expected b'GGUF'")
    version = cursor.u32("version")
    if version & 0xFFFF == 0 and version:
        found = int.from_bytes(version.to_bytes(4, "little"), "big")
        raise CheckpointError(
            f"{cursor.path}: a big-endian GGUF file (version {found}), expected little-endian:"
            " get the little-endian file or convert it with gguf_convert_endian"
        )
    if version not in VERSIONS:
        raise CheckpointError(f"{cursor.path}: GGUF version {version}, expected 2 or 3: get a newer file")
    return version


def _value(cursor: _Cursor, key: str) -> Value:
    kind = _value_type(cursor, key)
    if kind is not GGUFValueType.ARRAY:
        return _scalars(cursor, key, kind, 1)[0]
    item = _value_type(cursor, key)
    if item is GGUFValueType.ARRAY:
        raise CheckpointError(f"{cursor.path}: key {key}: an array of arrays, which no known key is")
    item_bytes = 8 if item is GGUFValueType.STRING else np.dtype(_SCALARS[item]).itemsize
    length = cursor.count(f"length of key {key}", MAX_ARRAY_LENGTH, item_bytes)
    return _scalars(cursor, key, item, length)


def _value_type(cursor: _Cursor, key: str) -> GGUFValueType:
    number = cursor.u32(f"type of key {key}")
    try:
        return GGUFValueType(number)
    except ValueError:
        raise CheckpointError(f"{cursor.path}: key {key}: unknown value type {number}: damaged file") from None


def _scalars(cursor: _Cursor, key: str, kind: GGUFValueType, count: int) -> list[Scalar]:
    if kind is GGUFValueType.STRING:
        what = f"key {key}"
        return [cursor.text(what, MAX_STRING_BYTES) for _ in range(count)]
    dtype = np.dtype(_SCALARS[kind])
    values = np.frombuffer(cursor.take(count * dtype.itemsize, f"key {key}"), dtype)
    if kind is GGUFValueType.FLOAT32:
        # The shortest decimal that is this float32: 1e-05 and not 9.999999747378752e-06.
        return [float(str(value)) for value in values]
    items: list[Scalar] = values.tolist()
    return items


def _alignment(path: Path, metadata: Mapping[str, Value]) -> int:
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise CheckpointError(
            f"{path}: general.alignment: expected a power of two up to {MAX_ALIGNMENT}, found {str(alignment)[:40]}"
        )
    return alignment


def _tensor(cursor: _Cursor, number: int) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
    """(name, type, shape with the rows' axis last, offset in the data) of the next tensor."""
    name = cursor.name(f"name of tensor {number}", MAX_NAME_BYTES)
    where = f"{cursor.path}: tensor {name}"
    dimensions = cursor.u32(f"dimensions of tensor {name}")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise CheckpointError(f"{where}: {dimensions} dimensions, expected 1..{MAX_DIMENSIONS}")
    sizes = struct.unpack(f"<{dimensions}Q", cursor.take(8 * dimensions, f"shape of tensor {name}"))
    number = cursor.u32(f"type of tensor {name}")
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise CheckpointError(f"{where}: unknown tensor type {number}") from None
    elements = 1
    for size in sizes:
        elements *= size
        if not 0 < size < 2**48 or elements >= 2**56:
            raise CheckpointError(f"{where}: shape {list(sizes)} is empty or larger than any file")
    block = GGML_QUANT_SIZES[kind][0]
    if sizes[0] % block:
        raise CheckpointError(
            f"{where}: rows of {sizes[0]} do not divide into the {block} weights a {kind.name} block has"
        )
    return name, kind, tuple(reversed(sizes)), cursor.u64(f"offset of tensor {name}")


def _nbytes(kind: GGMLQuantizationType, shape: tuple[int, ...]) -> int:
    block, nbytes = GGML_QUANT_SIZES[kind]
    for size in shape:
        nbytes *= size
    return nbytes // block


def _check_places(cursor: _Cursor, tensors: Iterable[GgufTensorInfo]) -> None:
    """Tensors, in file order, must not overlap and must end inside the file."""
    ordered = sorted(tensors, key=lambda tensor: (tensor.start, tensor.end))
    for before, tensor in pairwise(ordered):
        if tensor.start < before.end:
            raise CheckpointError(f"{cursor.path}: tensor {tensor.name} overlaps tensor {before.name}: damaged header")
    end = ordered[-1].end if ordered else 0
    if end > cursor.file_bytes:
        cut = next(tensor for tensor in ordered if tensor.end > cursor.file_bytes)
        raise CheckpointError(
            f"{cursor.path}: cut short: expected {end} bytes, found {cursor.file_bytes},"
            f" {end - cursor.file_bytes} missing (tensor {cut.name} is not complete): {_DOWNLOAD_AGAIN}"
        )
