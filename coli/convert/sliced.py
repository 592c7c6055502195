"""A dense llama checkpoint seen as a Mixtral that computes the same function: a real, small model with experts.

Every MLP is cut into slices of its intermediate neurons, all of them are chosen for every token, the router is zero, so
each weight is 1 / experts and down_proj carries the factor back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coli.convert.conversion import Notice, Progress, convert_source
from coli.convert.gguf import GgufSource
from coli.convert.options import ConvertOptions, ConvertReport
from coli.convert.source import Source, SourceTensor, TensorView
from coli.errors import OptionError

_MLP = re.compile(r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True, slots=True)
class _Slice(TensorView):
    """Rows first..first+rows-1 (gate, up) or columns (down, times `factor`) of a matrix."""

    first: int
    width: int
    factor: int  # 0: a slice of rows

    @property
    def shape(self) -> tuple[int, ...]:
        rows, cols = self.tensor.shape
        return (rows, self.width) if self.factor else (self.width, cols)

    @property
    def row_bytes(self) -> int:
        share = self.width / self.tensor.shape[1] if self.factor else 1
        return int(self.tensor.row_bytes * share)

    def read_rows(self, start: int, stop: int) -> NDArray[np.float32]:
        if not self.factor:
            return self.tensor.read_rows(self.first + start, self.first + stop)
        block = self.tensor.read_rows(start, stop)[:, self.first : self.first + self.width]
        return np.ascontiguousarray(block * np.float32(self.factor))


@dataclass(frozen=True, slots=True)
class _Zeros:
    """A router that prefers nobody."""

    shape: tuple[int, ...]
    name: str = "router"
    row_bytes: int = 0
    files: frozenset[str] = frozenset()
    native: None = None

    def read_rows(self, start: int, stop: int) -> NDArray[np.float32]:
        return np.zeros((stop - start, self.shape[1]), np.float32)


class SlicedSource:
    """`whole`, an open llama Source, as a Mixtral of `experts` experts; see source.Source."""

    def __init__(self, whole: Source, experts: int) -> None:
        config = dict(whole.config)
        width, left = divmod(int(config["intermediate_size"]), experts)
        if config["model_type"] != "llama" or left:
            raise OptionError(f"{whole.path}: cannot be cut into {experts} equal experts")
        self.path: Path = whole.path
        self.config_path: Path = whole.config_path
        self._whole = whole
        config |= {
            "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "intermediate_size": width,
            "num_local_experts": experts, "num_experts_per_tok": experts, "sliding_window": None,
        }  # fmt: skip
        self.config: Mapping[str, Any] = config
        self.config_text = json.dumps(config, indent=1, ensure_ascii=False).encode()
        self.tensors: Mapping[str, SourceTensor] = _tensors(whole.tensors, experts, width)
        self.files = whole.files
        self.description: Mapping[str, Any] = {**whole.description, "cut_into_experts": experts}
        self.side_files: Mapping[str, Path | bytes] = whole.side_files

    def signature(self) -> str:
        return f"{self._whole.signature()} as {self.config['num_local_experts']} experts"

    def close(self) -> None:
        self._whole.close()


def _tensors(whole: Mapping[str, SourceTensor], experts: int, width: int) -> dict[str, SourceTensor]:
    tensors: dict[str, SourceTensor] = {}
    for name, tensor in whole.items():
        found = _MLP.fullmatch(name)
        if found is None:
            tensors[name] = tensor
            continue
        prefix = f"model.layers.{found[1]}.mlp"
        factor = experts if found[2] == "down" else 0
        for expert in range(experts):
            part = _Slice(tensor, expert * width, width, factor)
            tensors[f"{prefix}.experts.{expert}.{found[2]}_proj.weight"] = part
        if found[2] == "gate":
            tensors[f"{prefix}.gate.weight"] = _Zeros((experts, tensor.shape[1]))
    return tensors


def convert_sliced(
    src: Path, dst: Path, experts: int, options: ConvertOptions, notice: Notice, progress: Progress | None = None
) -> ConvertReport:
    """Convert the dense llama GGUF `src` into a container `dst` with experts."""
    source = GgufSource(src)
    try:
        return convert_source(SlicedSource(source, experts), dst, options, notice, progress)
    finally:
        source.close()
