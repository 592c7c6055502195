"""What the matrices of a forward are about to read: the seam through which calibration sees activations.

The blocks note their inputs while a tape is recorded for watching; the transformer then stops the tape at each of them
and shows the rows. Nothing is noted, and nothing stops, in an ordinary forward.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from coli.kernels.tape import Tape
from coli.model.loader import Linear
from coli.model.program import Ints, SparsePoint

Rows = NDArray[np.float32]


class Look(Protocol):
    """Sees rows that are valid during the call only."""

    def dense(self, linears: tuple[Linear, ...], x: Rows) -> None:
        """`linears` read x (S, cols), or x (S, N, cols), each head's rows of the matrix what belongs to that head."""

    def expert(self, layer_idx: int, expert_id: int, rows: Ints, x: Rows, hidden: Rows) -> None:
        """An expert was chosen by `rows` (n,), ascending; gate and up read x (n, H), down reads hidden (n, I)."""


@dataclass(frozen=True, slots=True)
class DenseInput:
    """Matrices that read `x`, which is complete before call number `call` of the tape; row s*heads + h for head h."""

    call: int
    linears: tuple[Linear, ...]
    x: Rows
    heads: int = 1

    def show(self, look: Look) -> None:
        x = self.x
        look.dense(self.linears, x if self.heads == 1 else x.reshape(len(x) // self.heads, self.heads, -1))


@dataclass(frozen=True, slots=True)
class ExpertInputs:
    """A sparse layer: x (S, H) of all rows; hidden (S*A, I) of the batch just computed, pair p at its place in
    `index` (S, A) less the pairs of earlier batches."""

    point: SparsePoint
    x: Rows
    index: Ints
    hidden: Rows

    def show(self, look: Look, expert_id: int, earlier: int) -> None:
        """The rows of one expert of the batch, behind which `earlier` pairs were placed."""
        rows, picks = np.nonzero(self.point.expert_ids == expert_id)
        look.expert(self.point.layer_idx, expert_id, rows, self.x[rows], self.hidden[self.index[rows, picks] - earlier])


@dataclass(slots=True)
class Sight:
    """The inputs noted on one tape, in order."""

    tape: Tape
    inputs: list[DenseInput | ExpertInputs] = field(default_factory=list)

    def dense(self, linears: tuple[Linear, ...], x: Rows, heads: int = 1) -> None:
        self.inputs.append(DenseInput(len(self.tape), linears, x, heads))

    def experts(self, point: SparsePoint, x: Rows, index: Ints, hidden: Rows) -> None:
        self.inputs.append(ExpertInputs(point, x, index, hidden))
