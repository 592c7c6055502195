"""Files of small expert records with known bytes, for tests of the store."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

RECORD_BYTES = 4096


@dataclass(frozen=True, slots=True)
class FakeLayout:
    path: Path
    offset: int
    record_bytes: int


@cache
def record(layer_idx: int, expert_id: int, record_bytes: int = RECORD_BYTES) -> NDArray[np.uint8]:
    """The bytes of one record; every record differs from every other."""
    return np.random.default_rng([layer_idx, expert_id]).integers(0, 256, record_bytes, np.uint8)


def write_records(
    folder: Path, num_layers: int, num_experts: int, record_bytes: int = RECORD_BYTES, layers_per_file: int = 2
) -> dict[int, FakeLayout]:
    """Layouts of `num_layers` layers, a few layers to a file, after a header of 4096 bytes."""
    layouts = {}
    for start in range(0, num_layers, layers_per_file):
        path = folder / f"experts-{start:05d}.bin"
        with path.open("wb") as file:
            file.write(bytes(4096))
            for layer_idx in range(start, min(start + layers_per_file, num_layers)):
                layouts[layer_idx] = FakeLayout(path, file.tell(), record_bytes)
                for expert_id in range(num_experts):
                    file.write(record(layer_idx, expert_id, record_bytes).tobytes())
    return layouts


def routes(
    seed: int, forwards: int, num_layers: int, num_experts: int, num_experts_per_tok: int, rows: int = 1
) -> list[list[NDArray[np.int64]]]:
    """Skewed random routing: per forward and layer, (rows, A) distinct ascending expert ids per row."""
    rng = np.random.default_rng(seed)
    weight = 1.0 / np.arange(1, num_experts + 1)
    chance = [rng.permutation(weight) / weight.sum() for _ in range(num_layers)]
    return [
        [
            np.stack([np.sort(rng.choice(num_experts, num_experts_per_tok, False, p)) for _ in range(rows)])
            for p in chance
        ]
        for _ in range(forwards)
    ]
