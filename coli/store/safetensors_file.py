"""The header of a safetensors file, checked before anything is sliced or allocated, and reads of its tensors' bytes.

Strict where the format leaves room for accidents: one JSON object of at most 100 MB, no duplicate names, known dtypes,
offsets in range that neither overlap nor leave gaps, byte counts equal to shape x dtype, data exactly up to the end of
the file. Reads are pread into fresh memory, so a file cut under us is an error and never zeros or a signal.
"""

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from coli.errors import CheckpointError, ReadError
from coli.impostors import open_regular
from coli.store.strict_json import parse_object, refuse_impostor

MAX_HEADER_BYTES = 100_000_000
DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64,
    "U64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
DOWNLOAD_AGAIN = "download the file again"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: `start` and `end` are absolute byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """A checked header. `data_start` is the absolute offset of the first data byte; `metadata`: texts by name."""

    path: Path
    tensors: Mapping[str, TensorInfo]
    data_start: int
    file_bytes: int
    metadata: Mapping[str, str]


def read_header(path: Path, file_bytes: int | None = None) -> SafetensorsHeader:
    """Read and check the header of the file at `path`; CheckpointError names the file, the tensor and the fault.

    file_bytes: of the whole file, where `path` holds only its beginning so far.
    """
    try:
        with open_regular(path) as file:
            there = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            refuse_impostor(path, prefix + file.read(120))
            header_bytes = header_length(prefix, path)
            if 8 + header_bytes > there:
                raise CheckpointError(
                    f"{path}: header cut short: expected {8 + header_bytes} bytes, found {there}: {DOWNLOAD_AGAIN}"
                )
            file.seek(8)
            text = file.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    file_bytes = there if file_bytes is None else file_bytes
    header = parse_object(text, f"{path}: header")
    data_start = 8 + header_bytes
    tensors = {name: _tensor(path, name, entry, data_start) for name, entry in header.items() if name != "__metadata__"}
    _check_coverage(path, tensors, data_start, file_bytes)
    noted = header.get("__metadata__", {})
    noted = noted if isinstance(noted, dict) else {}
    metadata = {name: text for name, text in noted.items() if isinstance(text, str)}
    return SafetensorsHeader(path, tensors, data_start, file_bytes, metadata)


def header_length(prefix: bytes, path: Path) -> int:
    """Bytes of the header behind the 8 bytes `prefix` that begin the file `path`."""
    if len(prefix) < 8:
        raise CheckpointError(f"{path}: {len(prefix)} bytes, too short for a safetensors file: {DOWNLOAD_AGAIN}")
    (header_bytes,) = struct.unpack("<Q", prefix[:8])
    if header_bytes > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: header length {header_bytes}, more than the {MAX_HEADER_BYTES} bytes the format allows:"
            f" not a safetensors file, or a damaged one"
        )
    return int(header_bytes)


def _tensor(path: Path, name: str, entry: object, data_start: int) -> TensorInfo:
    where = f"{path}: tensor {name}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise _damaged(where, "expected dtype, shape and data_offsets in the header")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise _damaged(where, f"dtype must be a name, found {str(dtype)[:40]}")
    if dtype not in DTYPE_BITS:
        raise CheckpointError(
            f"{where}: unknown dtype {str(dtype)[:40]!r}: a damaged header, or a format newer than coli"
        )
    if not _is_size_list(shape):
        raise _damaged(where, f"shape must be a list of sizes, found {str(shape)[:60]}")
    if not _is_size_list(offsets) or len(offsets) != 2:
        raise _damaged(where, f"data_offsets must be two byte offsets, found {str(offsets)[:60]}")
    start, end = offsets
    if start > end:
        raise _damaged(where, f"data_offsets run backwards: {start} to {end}")
    bits = DTYPE_BITS[dtype]
    for size in shape:
        bits *= size
        if bits > 2**70:
            raise _damaged(where, f"shape {shape} is larger than any file")
    if bits % 8 or bits // 8 != end - start:
        raise _damaged(where, f"shape {shape} of {dtype} is {bits // 8} bytes, but data_offsets span {end - start}")
    return TensorInfo(name, dtype, tuple(shape), data_start + start, data_start + end)


def _damaged(where: str, fault: str) -> CheckpointError:
    return CheckpointError(f"{where}: {fault}: {DOWNLOAD_AGAIN}")


def _is_size_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_coverage(path: Path, tensors: Mapping[str, TensorInfo], data_start: int, file_bytes: int) -> None:
    """Tensors, in file order, must follow one another without overlap or gap up to the end of the file."""
    end, before = data_start, "the header"
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.end)):
        if tensor.start != end:
            fault = "overlaps" if tensor.start < end else "leaves a gap after"
            raise _damaged(str(path), f"tensor {tensor.name} {fault} {before}")
        end, before = tensor.end, f"tensor {tensor.name}"
    if end > file_bytes:
        cut = next(tensor for tensor in tensors.values() if tensor.end > file_bytes)
        raise CheckpointError(
            f"{path}: cut short: expected {end} bytes, found {file_bytes}, {end - file_bytes} missing"
            f" (tensor {cut.name} is not complete): {DOWNLOAD_AGAIN}"
        )
    if end < file_bytes:
        raise _damaged(str(path), f"{file_bytes - end} bytes after the last tensor, expected {end} in all")


class SafetensorsFile:
    """A checked safetensors file, open unless `header` is given: then `open` comes first, once the file is there.

    Reads may come from several threads.
    """

    def __init__(self, path: Path, header: SafetensorsHeader | None = None) -> None:
        self.header = read_header(path) if header is None else header
        self._descriptor = -1
        if header is None:
            self.open()

    def open(self) -> None:
        """Open the file for reading; nothing happens if it is."""
        if self._descriptor >= 0:
            return
        try:
            self._descriptor = os.open(self.header.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{self.header.path}: cannot be read: {error.strerror or error}") from None

    @property
    def is_open(self) -> bool:
        return self._descriptor >= 0

    def read(self, tensor: TensorInfo, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """`nbytes` bytes of `tensor` from its byte `offset` on; ReadError if the file does not give them."""
        assert 0 <= offset <= offset + nbytes <= tensor.nbytes
        buffer = np.empty(nbytes, np.uint8)
        read_exactly(self._descriptor, buffer.data, tensor.start + offset, self.header.path)
        return buffer

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_exactly(descriptor: int, buffer: memoryview, offset: int, path: Path) -> None:
    """Fill `buffer` from the file at `offset`; ReadError names `path` and the offset where it ended or failed."""
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(descriptor, [buffer[done:]], offset + done)
        except OSError as error:
            raise ReadError(f"{path}: read failed at byte {offset + done}: {error.strerror or error}") from None
        if count == 0:
            raise ReadError(
                f"{path}: ends at byte {offset + done}, {len(buffer) - done} bytes early: cut after it was opened"
            )
        done += count
