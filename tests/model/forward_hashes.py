"""Prints hashes of all logits bits of the containers named, as JSON: the same on every instruction set and numpy.

python forward_hashes.py auto|avx512|avx2|generic THREADS CONTAINER...
"""

import hashlib
import json
import os
import sys
from pathlib import Path

from coli.kernels import runtime

runtime.configure(sys.argv[1], os.environ.get("COLI_KERNEL_CACHE"), int(sys.argv[2]))

import numpy as np  # noqa: E402
from forward_runs import Runner  # noqa: E402

from coli.model import layers  # noqa: E402

layers.SMALL_WORK = 0  # these models are too small for two threads otherwise

IDS = [(17 * i * i + 5 * i + 3) % 250 for i in range(40)]
CUTS = ([1] * 40, [40], [3, 16, 21], [7, 33])
PARENTS = [-1, 0, 0, 1, 2, 2, 5, 3]


def hashes(path: Path, kv: str) -> list[str]:
    """Of each cut of the ids, and of a tree of rows behind them."""
    runner = Runner(path, threads=int(sys.argv[2]), kv=kv)
    found = [runner.chunks(IDS, cut, prefill=cut == [40]) for cut in CUTS]
    cache, rows = runner.cache(), np.arange(len(IDS))
    runner.model.forward(cache, np.array(IDS), rows, None, np.array([], np.int64), prefill=True)
    depth = [0] * len(PARENTS)
    for row, parent in enumerate(PARENTS):
        depth[row] = depth[parent] + 1 if parent >= 0 else 0
    tree = np.arange(len(PARENTS))
    positions = len(IDS) + np.array(depth)
    found.append(runner.model.forward(cache, tree + 9, positions, np.array(PARENTS), tree, prefill=False))
    assert all(np.isfinite(logits).all() for logits in found)
    return [hashlib.sha256(np.ascontiguousarray(logits).tobytes()).hexdigest()[:16] for logits in found]


result = {f"{path} {kv}": hashes(Path(path), kv) for path in sys.argv[3:] for kv in ("f32", "f16")}
print(json.dumps({"path": runtime.simd_path(), "hashes": result}))
