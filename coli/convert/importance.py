"""How much each input column of a matrix matters: what weights the squared error of q4 scales.

Plain values. Who measures them (coli.tools.calibrate) implements Calibration; conversion asks for them once it knows
that something is going to be stored as q4.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Columns = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Importance:
    """Mean squared activations by input column, > 0: of dense matrices (cols,), of those that hold a matrix per head
    (N, cols), of expert parts (E, cols)."""

    dense: Mapping[str, Columns]  # by tensor name
    experts: Mapping[int, Mapping[str, Columns]]  # by layer and part

    def of_dense(self, name: str) -> Columns | None:
        """None for a matrix that multiplies nothing (an embedding that is only looked up)."""
        return self.dense.get(name)

    def of_expert(self, layer_idx: int, expert_id: int, part: str) -> Columns:
        columns: Columns = self.experts[layer_idx][part][expert_id]
        return columns


class Calibration(Protocol):
    """Measures the importance of one source's columns."""

    @property
    def signature(self) -> str:
        """Changes with whatever the importance depends on, the source aside."""

    @property
    def description(self) -> str:
        """What coli.json says about it."""

    def measure(self, source_signature: str) -> Importance: ...
