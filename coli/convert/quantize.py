"""One row block of weights -> packed bytes and scales of its tiles. The arithmetic belongs to the kernels."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coli.convert.source import QuantizedRows
from coli.errors import CheckpointError
from coli.kernels import quantize
from coli.store.layout import Kind


@dataclass(frozen=True, slots=True)
class Encoded:
    """Whole tiles in file order: C-contiguous weights, and scales (tiles, groups, 16) unless f32."""

    weights: NDArray[Any]
    scales: NDArray[Any] | None


def encode(
    kind: Kind, block: NDArray[np.float32], name: str, threads: int, importance: NDArray[np.float32] | None = None
) -> Encoded:
    """Quantize and pack finite weights (rows, cols), padded to tiles of 16 rows and groups of 32 inputs.

    importance (cols,) weights the squared error that q4 scales make least, (n, cols) that of each of n equal runs of
    rows; None: all columns alike.
    CheckpointError names the tensor if a weight is too large for a float16 scale.
    """
    if kind is Kind.F32:
        return Encoded(quantize.pack_f32(block, threads), None)
    report = np.zeros(len(quantize.REPORT), np.int64)
    if kind is Kind.Q8:
        weights, scales = quantize.pack_q8(*quantize.quantize_q8(block, report, threads), threads)
    elif importance is None or importance.ndim == 1:
        weights, scales = quantize.pack_q4(*quantize.quantize_q4(block, importance, report, threads), threads)
    else:
        runs = zip(np.split(block, len(importance)), importance, strict=True)
        parts = [quantize.quantize_q4(part, columns, report, threads) for part, columns in runs]
        nibbles, group_scales = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        weights, scales = quantize.pack_q4(nibbles, group_scales, threads)
    not_finite, overflows, _ = report
    assert not not_finite, f"{name}: checked before"
    if overflows:
        raise CheckpointError(
            f"tensor {name}: weights up to {np.abs(block).max():g} are too large for {kind.label}: convert with f32"
        )
    return Encoded(weights, scales)


def pack(kind: Kind, block: QuantizedRows) -> Encoded:
    """Pack rows that are quantized already; no weight and no scale changes."""
    packers = {Kind.Q4: quantize.pack_q4, Kind.Q8: quantize.pack_q8, Kind.MXFP4: quantize.pack_mxfp4}
    weights, scales = packers[kind](block.quants, block.scales)
    return Encoded(weights, scales)
