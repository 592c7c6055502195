"""What conversion reads from: a checkpoint of any format, as config, named tensors and files to copy.

A format (hf.py, gguf.py) implements Source; plan.py turns its tensors into matrices. Reads return float32 rows, or
quantized ones where the source already holds what a container stores, and may come from several threads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from coli.errors import CheckpointError
from coli.store.layout import Kind


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Rows of groups of 32: quants (rows, cols) uint8 nibbles or int8, scales (rows, cols / 32) float16, or uint8
    exponents of MXFP4."""

    quants: NDArray[np.uint8] | NDArray[np.int8]
    scales: NDArray[np.float16] | NDArray[np.uint8]


class NativeRows(Protocol):
    """The rows of a tensor that the source holds in a kind of ours, bit for bit."""

    @property
    def kind(self) -> Kind:
        """Q4: quants are nibbles, weight (nibble - 8) * scale. Q8: int8, weight quant * scale. MXFP4: E2M1 codes,
        value of the code * 2**(scale - 127)."""

    def read(self, start: int, stop: int) -> QuantizedRows:
        """Rows start..stop-1, seen as read_rows sees them."""


class SourceTensor(Protocol):
    """One tensor of a checkpoint, seen as rows of its last axis."""

    @property
    def name(self) -> str:
        """The name in the source, for messages."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def row_bytes(self) -> int:
        """Bytes one row takes in the source, for progress."""

    @property
    def files(self) -> frozenset[str]:
        """Names, as in Source.files, of the files its rows come from."""

    @property
    def native(self) -> NativeRows | None:
        """The same rows without dequantizing; None where the source holds numbers or a kind we do not store."""

    def read_rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows start..stop-1 of the tensor seen as (product of the leading axes, last axis), as float32."""


@dataclass(frozen=True, slots=True)
class TensorView:
    """What the tensors made out of another one have in common: its name and files, and rows that are numbers."""

    tensor: SourceTensor

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def files(self) -> frozenset[str]:
        return self.tensor.files

    @property
    def native(self) -> NativeRows | None:
        return None


class Source(Protocol):
    """A checkpoint, opened and checked; nothing of it is ever written."""

    @property
    def path(self) -> Path: ...

    @property
    def config_path(self) -> Path:
        """Where the configuration stands, for messages."""

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json, parsed."""

    @property
    def config_text(self) -> bytes:
        """config.json as it will be stored."""

    @property
    def tensors(self) -> Mapping[str, SourceTensor]:
        """All tensors by the name in the source."""

    @property
    def files(self) -> Sequence[str]:
        """Names of the weight files, in the order in which they are best read."""

    @property
    def description(self) -> Mapping[str, Any]:
        """What coli.json says about where the model came from; no absolute path."""

    @property
    def side_files(self) -> Mapping[str, Path | bytes]:
        """Tokenizer, template and generation files by name: a file to copy as it is, or its content."""

    def signature(self) -> str:
        """Changes when any file of the checkpoint is replaced, grows or shrinks."""

    def close(self) -> None: ...


class Delivery(Protocol):
    """Where the files of a source come from while it is being converted, for one that is not all there yet."""

    def room(self) -> int:
        """Bytes on the disk that the files still to come will take at most at one time."""

    def bring(self, name: str) -> None:
        """Have the file `name` complete and open; returns at once when it is."""

    def spent(self, name: str) -> None:
        """All that was made of the file `name` is safely on the disk."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A matrix inside a source tensor: `rows` rows from `first` on (one expert of a fused tensor, or all of it)."""

    tensor: SourceTensor
    first: int
    rows: int

    @property
    def cols(self) -> int:
        return self.tensor.shape[-1]

    @property
    def native_kind(self) -> Kind | None:
        """The kind in which these rows can be had bit for bit."""
        native = self.tensor.native
        return None if native is None else native.kind

    def read_native(self, start: int, stop: int) -> QuantizedRows:
        """Rows start..stop-1 of this matrix as the source holds them; CheckpointError if a scale is NaN or inf."""
        native = self.tensor.native
        assert native is not None, self.tensor.name
        block = native.read(self.first + start, self.first + stop)
        finite = (block.scales != 255 if native.kind is Kind.MXFP4 else np.isfinite(block.scales)).all(axis=1)
        if not finite.all():
            row = self.first + start + int(np.argmin(finite))
            raise CheckpointError(
                f"tensor {self.tensor.name}: scale is NaN or inf in row {row}: the weights are damaged"
            )
        return block

    def read(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows start..stop-1 of this matrix, float32, all finite; CheckpointError names the tensor otherwise."""
        block = self.tensor.read_rows(self.first + start, self.first + stop)
        finite = np.isfinite(block)
        if not finite.all():
            row = int(np.argmin(finite.all(axis=1)))
            value = block[row][~finite[row]][0]
            raise CheckpointError(
                f"tensor {self.tensor.name}: {value} in row {self.first + start + row}: the weights are damaged"
            )
        return block
