"""One row block of float32 weights -> packed bytes and scales of its tiles. The arithmetic belongs to the kernels."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coli.store.layout import GROUP_SIZE, TILE_ROWS, Kind, round_up


@dataclass(frozen=True, slots=True)
class Encoded:
    """Whole tiles in file order: C-contiguous weights, and float16 scales (tiles, groups, 16) unless f32."""

    weights: NDArray[Any]
    scales: NDArray[np.float16] | None


def encode(kind: Kind, block: NDArray[np.float32], threads: int) -> Encoded:
    """Quantize and pack `block` (rows, cols), padded with zeros to tiles of 16 rows and groups of 32 inputs."""
    rows, cols = block.shape
    padded_rows, padded_cols = round_up(rows, TILE_ROWS), round_up(cols, GROUP_SIZE)
    if (padded_rows, padded_cols) != block.shape:
        padded = np.zeros((padded_rows, padded_cols), np.float32)
        padded[:rows, :cols] = block
        block = padded
    tiles = padded_rows // TILE_ROWS
    if kind is Kind.F32:
        return Encoded(np.ascontiguousarray(block.reshape(tiles, TILE_ROWS, padded_cols).transpose(0, 2, 1)), None)
    raise NotImplementedError(kind)
