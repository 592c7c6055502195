"""FP8 checkpoints (DeepSeek-V3, GLM-5): e4m3 numbers with one float scale per block of rows and columns.

`NAME.weight` of dtype F8_E4M3 belongs to `NAME.weight_scale_inv`, (ceil(rows / block), ceil(cols / block)): the last
block of an axis may be ragged. A weight is number * scale, in float32.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coli.convert.source import SourceTensor
from coli.errors import CheckpointError, UnsupportedModelError
from coli.model.config import MAX_SIZE, ConfigReader

E4M3 = "F8_E4M3"
SCALES = "_scale_inv"
BLOCK = (128, 128)


def _numbers() -> NDArray[np.float32]:
    """The value of each of the 256 bytes: 1 sign, 4 exponent (bias 7) and 3 mantissa bits; no infinities."""
    byte = np.arange(128)
    exponent, mantissa = byte >> 3, (byte & 7) / 8
    half = np.where(exponent > 0, np.ldexp(1 + mantissa, exponent - 7), np.ldexp(mantissa, -6)).astype(np.float32)
    half[127] = np.nan
    return np.concatenate([half, -half])


@dataclass(frozen=True, slots=True)
class ScaledTensor:
    """A matrix of bytes with its block scales; see source.SourceTensor."""

    bytes: SourceTensor  # read_rows gives the bytes themselves
    scales: SourceTensor
    block: tuple[int, int]

    @property
    def name(self) -> str:
        return self.bytes.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bytes.shape

    @property
    def row_bytes(self) -> int:
        return self.shape[-1]

    @property
    def files(self) -> frozenset[str]:
        return self.bytes.files | self.scales.files

    @property
    def native(self) -> None:
        return None

    def read_rows(self, start: int, stop: int) -> NDArray[np.float32]:
        rows, cols = self.block
        first = start // rows
        scales = self.scales.read_rows(first, -(-stop // rows))
        row_blocks, col_blocks = np.arange(start, stop) // rows - first, np.arange(self.shape[1]) // cols
        return self.bytes.read_rows(start, stop) * scales[np.ix_(row_blocks, col_blocks)]


def block_size(config: Mapping[str, Any], path: Path) -> tuple[int, int]:
    """weight_block_size of the quantization_config."""
    table = ConfigReader(config, path).table("quantization_config") or {}
    reader = ConfigReader(table, path, "quantization_config")
    found = reader.integers("weight_block_size") or BLOCK
    if len(found) != 2 or not 1 <= min(found) <= max(found) <= MAX_SIZE:
        raise reader.wrong("weight_block_size", f"two numbers from 1 to {MAX_SIZE}", list(found))
    return found[0], found[1]


def with_scales(
    tensors: Mapping[str, SourceTensor], fp8: frozenset[str], block: tuple[int, int]
) -> Mapping[str, SourceTensor]:
    """`tensors` with each of the FP8 matrices `fp8` joined to its scales; CheckpointError names what does not fit."""
    found = {name: tensor for name, tensor in tensors.items() if name.removesuffix(SCALES) not in fp8 or name in fp8}
    for name in fp8:
        tensor, scales = tensors[name], tensors.get(name + SCALES)
        if len(tensor.shape) != 2:
            raise UnsupportedModelError(f"tensor {tensor.name}: FP8 of {len(tensor.shape)} axes is not supported")
        if scales is None:
            raise CheckpointError(f"tensor {tensor.name}: FP8 without its {name}{SCALES}: download it again")
        shape = tuple(-(-size // step) for size, step in zip(tensor.shape, block, strict=True))
        if scales.shape != shape:
            raise CheckpointError(
                f"tensor {scales.name}: shape {list(scales.shape)}, but blocks of {list(block)} make it {list(shape)}"
            )
        found[name] = ScaledTensor(tensor, scales, block)
    return found


NUMBERS = _numbers()
