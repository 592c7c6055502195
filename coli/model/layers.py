"""What the blocks of a layer share: projections of the same rows, and the dense SwiGLU block.

Owns buffers and job tables; the arithmetic is the kernels'. Called by the transformer, one thread.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coli.kernels import activations, elementwise, matmul
from coli.model.loader import Linear, MlpWeights

TILE = 16

Rows = NDArray[np.float32]


def tile_padded(width: int) -> int:
    """`width` rounded up to whole tiles: what a projection writes."""
    return -(-width // TILE) * TILE


class Buffers:
    """Scratch memory by name, kept from forward to forward and grown when a forward has more rows."""

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[Any]] = {}

    def rows(self, name: str, count: int, width: int) -> Rows:
        """(count, width) float32, rows contiguous and 64-byte aligned, content undefined."""
        stride = tile_padded(width)
        array = self._arrays.get(name)
        if array is None or array.size < count * stride:
            array = self._arrays[name] = activations.aligned(count * stride, np.float32)
        return array[: count * stride].reshape(count, stride)[:, :width]

    def bytes(self, name: str, size: int) -> NDArray[np.uint8]:
        """At least `size` bytes, 64-byte aligned, content undefined."""
        array = self._arrays.get(name)
        if array is None or array.nbytes < size:
            array = self._arrays[name] = activations.aligned(size)
        return array

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays.values())


@dataclass(frozen=True, slots=True)
class Machine:
    """What every block needs to run: scratch buffers and the number of threads."""

    buffers: Buffers
    threads: int


def flat(rows: Rows) -> Rows:
    """The whole buffer behind `rows`, padding included, as one dimension."""
    stride = rows.strides[0] // 4
    return np.lib.stride_tricks.as_strided(rows, (rows.shape[0] * stride,), (4,))


class Projection:
    """Matrices that share their input, multiplied in one launch; outputs side by side in one buffer.

    `columns[i]` is where matrix i's output starts; each takes whole tiles of 16 columns.
    """

    def __init__(self, name: str, linears: tuple[Linear, ...]) -> None:
        self._name = name
        self._linears = linears
        widths = [TILE * linear.tiles for linear in linears]
        self.columns = tuple(int(at) for at in np.cumsum([0, *widths[:-1]]))
        self._width = sum(widths)
        self._groups = linears[0].groups
        self._kinds = sorted({linear.kind for linear in linears})
        self._jobs = matmul.job_table(len(linears))
        for job, linear in zip(self._jobs, linears, strict=True):
            job[matmul.JOB_KIND], job[matmul.JOB_TILES] = linear.kind, linear.tiles
            job[matmul.JOB_WEIGHTS], job[matmul.JOB_SCALES] = linear.weights, linear.scales
            job[matmul.JOB_GROUPS], job[matmul.JOB_BIAS] = linear.groups, linear.bias
        self._jobs[:, matmul.JOB_OUT] = self.columns

    def __call__(self, machine: Machine, x: Rows) -> Rows:
        """x (S, cols) -> (S, width), width a multiple of 16."""
        S = x.shape[0]
        sizes = [matmul.x_bytes(kind, S, self._groups) for kind in self._kinds]
        packed = machine.buffers.bytes("packed", sum(sizes))
        starts = dict(zip(self._kinds, np.cumsum([0, *sizes[:-1]]), strict=True))
        blocks = np.array([[0, S, kind, starts[kind]] for kind in self._kinds], np.int64)
        activations.pack_blocks(x, np.arange(S, dtype=np.int64), blocks, packed, machine.threads)
        out = machine.buffers.rows(self._name, S, self._width)
        jobs = self._jobs
        jobs[:, matmul.JOB_ROWS] = S
        jobs[:, matmul.JOB_X] = [starts[linear.kind] for linear in self._linears]
        jobs[:, matmul.JOB_STRIDE] = self._width
        matmul.run_jobs(jobs, packed, flat(out), machine.threads)
        return out


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
        elementwise.swiglu(gate_up, self._width, self._gate_up.columns[1], hidden, machine.threads)
        return self._down(machine, hidden)
