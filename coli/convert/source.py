"""What conversion reads from: a checkpoint of any format, as config, named tensors and files to copy.

A format (hf.py, later gguf.py) implements Source; plan.py turns its tensors into matrices. Reads return float32 rows
and may come from several threads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from coli.errors import CheckpointError


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

    def read_rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows start..stop-1 of the tensor seen as (product of the leading axes, last axis), as float32."""


class Source(Protocol):
    """A checkpoint, opened and checked; nothing of it is ever written."""

    @property
    def path(self) -> Path: ...

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
    def description(self) -> Mapping[str, Any]:
        """What coli.json says about where the model came from; no absolute path."""

    @property
    def side_files(self) -> Sequence[Path]:
        """Tokenizer, template and generation files, to be copied as they are."""

    def signature(self) -> str:
        """Changes when any file of the checkpoint is replaced, grows or shrinks."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Rows:
    """A matrix inside a source tensor: `rows` rows from `first` on (one expert of a fused tensor, or all of it)."""

    tensor: SourceTensor
    first: int
    rows: int

    @property
    def cols(self) -> int:
        return self.tensor.shape[-1]

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
