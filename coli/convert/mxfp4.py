"""MXFP4 tensors: 4-bit floats (E2M1) in groups of 32 with one power of two each (OCP Microscaling Formats 1.0).

In Hugging Face checkpoints `NAME_blocks` (..., rows, groups, 16) uint8, low nibble first, belongs to `NAME_scales`
(..., rows, groups) uint8, exponents with bias 127. They are kept as they are: a container has a kind for them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from coli.convert.source import NativeRows, QuantizedRows, SourceTensor
from coli.errors import CheckpointError
from coli.kernels.quantize import dequantize_mxfp4
from coli.store.layout import GROUP_SIZE, Kind

BLOCKS, SCALES = "_blocks", "_scales"


class ByteTensor(SourceTensor, Protocol):
    """A tensor whose rows can be had as bytes."""

    def read_bytes(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Rows start..stop-1 of the last axis, (rows, bytes)."""


@dataclass(frozen=True, slots=True)
class Mxfp4Tensor:
    """Blocks with their exponents as rows (..., rows, cols); see source.SourceTensor and source.NativeRows."""

    blocks: ByteTensor
    scales: ByteTensor
    kind: Kind = Kind.MXFP4

    @property
    def name(self) -> str:
        return self.blocks.name

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.blocks.shape[:-2], self._groups * GROUP_SIZE)

    @property
    def row_bytes(self) -> int:
        return self._groups * (GROUP_SIZE // 2 + 1)

    @property
    def files(self) -> frozenset[str]:
        return self.blocks.files | self.scales.files

    @property
    def native(self) -> NativeRows:
        return self

    @property
    def _groups(self) -> int:
        return self.blocks.shape[-2]

    def read(self, start: int, stop: int) -> QuantizedRows:
        raw = self.blocks.read_bytes(start * self._groups, stop * self._groups)
        codes = np.stack([raw & 15, raw >> 4], axis=2)  # group, byte, nibble
        return QuantizedRows(codes.reshape(stop - start, -1), self.scales.read_bytes(start, stop))

    def read_rows(self, start: int, stop: int) -> NDArray[np.float32]:
        rows = self.read(start, stop)
        weights = dequantize_mxfp4(rows.quants, rows.scales)
        weights[np.repeat(rows.scales == 255, GROUP_SIZE, axis=1)] = np.nan  # as the format has it
        return weights


def with_mxfp4(tensors: Mapping[str, ByteTensor]) -> Mapping[str, SourceTensor]:
    """`tensors` with blocks joined to their scales; CheckpointError names what does not fit."""
    found: dict[str, SourceTensor] = dict(tensors)
    for name, blocks in tensors.items():
        stem = name.removesuffix(BLOCKS)
        if stem == name or len(blocks.shape) < 3 or blocks.shape[-1] != GROUP_SIZE // 2:
            continue
        scales = tensors.get(stem + SCALES)
        if scales is None:
            raise CheckpointError(f"tensor {blocks.name}: MXFP4 without its {stem + SCALES}: download it again")
        if scales.shape != blocks.shape[:-1]:
            raise CheckpointError(
                f"tensor {scales.name}: shape {list(scales.shape)}, but its blocks make it {list(blocks.shape[:-1])}"
            )
        del found[name], found[stem + SCALES]
        found[stem] = Mxfp4Tensor(blocks, scales)
    return found
