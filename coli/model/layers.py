"""What the blocks of a layer share: projections of the same rows, and the dense SwiGLU block.

Owns buffers and job tables; the arithmetic is the kernels'. Called by the transformer, one thread.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coli.kernels import activations, elementwise, matmul
from coli.model.loader import Linear, MlpWeights
from coli.model.sight import Sight

TILE = 16

Rows = NDArray[np.float32]


def tile_padded(width: int) -> int:
    """`width` rounded up to whole tiles: what a projection writes."""
    return -(-width // TILE) * TILE


def spread(width: int) -> int:
    """The row stride for what a product writes: `width` (whole tiles) or one tile more. A tile of many rows is written
    at a time, and rows a multiple of 2048 bytes apart meet in few cache sets."""
    return width + TILE if 4 * width % 2048 == 0 else width


class Buffers:
    """Scratch memory by name, kept from forward to forward and grown when a forward has more rows.

    It grows to twice its size or more: recorded programs hold the arrays they were recorded with, and those before a
    growth must not add up to more than the last.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[Any]] = {}

    def rows(self, name: str, count: int, width: int) -> Rows:
        """(count, width) float32, rows contiguous and 64-byte aligned, content undefined."""
        stride = tile_padded(width)
        array = self._arrays.get(name)
        if array is None or array.size < count * stride:
            array = self._arrays[name] = activations.aligned((1 << (count - 1).bit_length()) * stride, np.float32)
        return array[: count * stride].reshape(count, stride)[:, :width]

    def bytes(self, name: str, size: int) -> NDArray[np.uint8]:
        """At least `size` bytes, 64-byte aligned, content undefined."""
        array = self._arrays.get(name)
        if array is None or array.nbytes < size:
            array = self._arrays[name] = activations.aligned(max(size, 2 * array.nbytes if array is not None else 0))
        return array

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays.values())


SMALL_WORK = 1 << 15  # multiply-adds or elements below which a launch on several threads costs more than it saves


@dataclass(frozen=True, slots=True)
class Machine:
    """What every block needs to run: scratch buffers and the number of threads; `sight` where it is watched."""

    buffers: Buffers
    threads: int
    sight: Sight | None = None

    def threads_for(self, work: int) -> int:
        """Threads worth launching for so many elements."""
        return self.threads if work >= SMALL_WORK else 1


class Projection:
    """Matrices that share their input, multiplied in one launch; outputs side by side in one buffer.

    `columns[i]` is where matrix i's output starts; each takes whole tiles of 16 columns.
    """

    def __init__(self, name: str, linears: tuple[Linear, ...]) -> None:
        self._name, self._linears = name, linears
        widths = [TILE * linear.tiles for linear in linears]
        self.columns = tuple(int(at) for at in np.cumsum([0, *widths[:-1]]))
        self._width = sum(widths)
        self._stride = spread(self._width)
        self._groups = linears[0].groups
        self._kinds = sorted({linear.kind for linear in linears})
        self._jobs = matmul.job_table(len(linears))  # all but the number of rows and where they lie
        for job, linear, column in zip(self._jobs, linears, self.columns, strict=True):
            job[matmul.JOB_KIND], job[matmul.JOB_TILES] = linear.kind, linear.tiles
            job[matmul.JOB_WEIGHTS], job[matmul.JOB_SCALES] = linear.weights, linear.scales
            job[matmul.JOB_GROUPS], job[matmul.JOB_BIAS] = linear.groups, linear.bias
            job[matmul.JOB_OUT], job[matmul.JOB_STRIDE] = column, self._stride

    def __call__(self, machine: Machine, x: Rows) -> Rows:
        """x (S, cols) -> (S, width), width a multiple of 16."""
        S, cols = x.shape
        if machine.sight is not None:
            machine.sight.dense(self._linears, x)
        jobs, end = self._jobs.copy(), 0
        jobs[:, matmul.JOB_ROWS] = S
        blocks = np.zeros((len(self._kinds), 4), np.int64)
        for i, kind in enumerate(self._kinds):
            blocks[i] = 0, S, kind, end
            if i > 0:
                jobs[jobs[:, matmul.JOB_KIND] == kind, matmul.JOB_X] = end
            end += matmul.x_bytes(kind, S, self._groups)
        packed = machine.buffers.bytes("packed", end)
        every_row = np.arange(S, dtype=np.int64)
        activations.pack_blocks(x, every_row, blocks, packed, machine.threads_for(4 * S * cols))
        out = machine.buffers.rows(self._name, S, self._stride)
        matmul.run_jobs(jobs, packed, out.reshape(-1), machine.threads_for(self._width * cols))
        return out[:, : self._width]


def norm(
    x: Rows, weight: NDArray[np.float32], bias: NDArray[np.float32] | None, eps: float, out: Rows, threads: int = 1
) -> None:
    """RMSNorm of x (S, H), or LayerNorm where there is a bias (H,)."""
    if bias is None:
        elementwise.rms_norm(x, weight, eps, out, threads)
    else:
        elementwise.layer_norm(x, weight, bias, eps, out, threads)


def scaled_add(hidden: Rows, branch: Rows, factor: float, threads: int) -> None:
    """hidden += factor * branch; branch is overwritten where the factor is not 1."""
    if factor != 1.0:
        elementwise.scale(branch, factor, threads)
    elementwise.add(hidden, branch, threads)


class Mlp:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, weights: MlpWeights) -> None:
        self._gate_up = Projection("gate_up", (weights.gate_proj, weights.up_proj))
        self._down = Projection("down", (weights.down_proj,))
        self._width = weights.down_proj.cols

    def __call__(self, machine: Machine, x: Rows) -> Rows:
        """x (S, H) -> (S, tile_padded(H))."""
        gate_up = self._gate_up(machine, x)
        hidden = machine.buffers.rows("mlp_hidden", x.shape[0], self._width)
        threads = machine.threads_for(8 * hidden.size)
        elementwise.swiglu(gate_up, self._width, self._gate_up.columns[1], hidden, threads)
        return self._down(machine, hidden)
