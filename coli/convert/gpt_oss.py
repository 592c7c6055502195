"""The fused experts of gpt-oss as one tensor per matrix: gate and up rows alternate, float experts lie transposed.

gate_up_proj is (E, H, 2 I) in floats, columns gate, up, gate, up ...; as MXFP4 it is (E, 2 I, H), rows alternating.
down_proj is (E, I, H) in floats, (E, H, I) as MXFP4. Nothing is computed, so nothing is rounded.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coli.convert.source import NativeRows, QuantizedRows, SourceTensor, TensorView
from coli.errors import CheckpointError
from coli.model.config import ModelSpec
from coli.store.layout import GROUP_SIZE, Kind, round_up

_NAME = re.compile(r"(?P<stem>.*\.mlp\.experts\.)(?P<which>gate_up|down)_proj(?P<bias>_bias)?$")


@dataclass(frozen=True, slots=True)
class TurnedExperts(TensorView):
    """Columns first, first + step ... of (E, inputs, outputs) as rows: (E, rows, inputs); see source.SourceTensor."""

    first: int
    step: int

    @property
    def shape(self) -> tuple[int, ...]:
        experts, inputs, outputs = self.tensor.shape
        return experts, outputs // self.step, inputs

    @property
    def row_bytes(self) -> int:
        return self.tensor.row_bytes * self.shape[2] // (self.shape[1] * self.step)

    def read_rows(self, start: int, stop: int) -> NDArray[np.float32]:
        _, rows, inputs = self.shape
        found = []
        for expert_id in range(start // rows, -(-stop // rows)):
            matrix = self.tensor.read_rows(expert_id * inputs, (expert_id + 1) * inputs)
            low, high = max(start - expert_id * rows, 0), min(stop - expert_id * rows, rows)
            found.append(matrix[:, self.first :: self.step][:, low:high].T)
        return np.ascontiguousarray(np.concatenate(found))


@dataclass(frozen=True, slots=True)
class EveryOther(TensorView):
    """Rows first, first + step ... of each expert's, without the padding of their last group; see source.SourceTensor
    and source.NativeRows."""

    first: int
    step: int
    inputs: int

    @property
    def shape(self) -> tuple[int, ...]:
        experts, rows, _ = self.tensor.shape
        return experts, rows // self.step, self.inputs

    @property
    def row_bytes(self) -> int:
        return self.tensor.row_bytes

    @property
    def native(self) -> NativeRows | None:
        return None if self.tensor.native is None else self

    @property
    def kind(self) -> Kind:
        assert self.tensor.native is not None
        return self.tensor.native.kind

    def read(self, start: int, stop: int) -> QuantizedRows:
        assert self.tensor.native is not None
        block = self.tensor.native.read(start * self.step, stop * self.step)
        return QuantizedRows(block.quants[self.first :: self.step], block.scales[self.first :: self.step])

    def read_rows(self, start: int, stop: int) -> NDArray[np.float32]:
        return self.tensor.read_rows(start * self.step, stop * self.step)[self.first :: self.step, : self.inputs]


@dataclass(frozen=True, slots=True)
class Alternating(TensorView):
    """Columns first, first + 2 ... of a matrix (E, 2 I), one bias per expert; see source.SourceTensor."""

    first: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape[0], self.tensor.shape[1] // 2

    @property
    def row_bytes(self) -> int:
        return self.tensor.row_bytes // 2

    def read_rows(self, start: int, stop: int) -> NDArray[np.float32]:
        return np.ascontiguousarray(self.tensor.read_rows(start, stop)[:, self.first :: 2])


def with_expert_matrices(tensors: Mapping[str, SourceTensor], spec: ModelSpec) -> dict[str, SourceTensor]:
    """`tensors` with the fused experts split into gate_proj, up_proj and down_proj, each (E, rows, inputs)."""
    found: dict[str, SourceTensor] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            found[name] = tensor
            continue
        stem, fused = match["stem"], match["which"] == "gate_up"
        inputs, outputs = spec.hidden_size, spec.moe_intermediate_size
        if not fused:
            inputs, outputs = outputs, inputs
        rows, step = (2 * outputs, 2) if fused else (outputs, 1)
        turned = tensor.native is None
        shape: tuple[int, ...] = (spec.num_experts, inputs, rows)
        if not turned:
            shape = spec.num_experts, rows, round_up(inputs, GROUP_SIZE)
        if match["bias"]:
            shape = spec.num_experts, rows
        if tensor.shape != shape:
            raise CheckpointError(
                f"tensor {tensor.name}: shape {list(tensor.shape)}, but config.json makes it {list(shape)}"
            )
        for first, part in enumerate(("gate", "up") if fused else ("down",)):
            if match["bias"]:
                found[f"{stem}{part}_proj_bias"] = Alternating(tensor, first) if fused else tensor
            else:
                found[f"{stem}{part}_proj"] = (
                    TurnedExperts(tensor, first, step) if turned else EveryOther(tensor, first, step, inputs)
                )
    return found
