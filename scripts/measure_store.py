"""What the expert store costs when every expert is in memory: decoding with it and with a bare table of addresses.

    python scripts/measure_store.py [MODEL] [--tokens 64] [--rounds 15]

One model, two forwards over the same weights and records: one behind the store (its accounting, budget watch and reader
threads), one behind an object that only holds the addresses and hears nothing. They decode the same ids in turns, so
the ratio within a round counts. Also: seconds to open the container and to load it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from coli.builtin import DEMO_MODEL
from coli.llm import LLM
from coli.model.transformer import Transformer
from coli.options import EngineOptions

Ints = NDArray[np.int64]


class Addresses:
    """Records that are all in memory, and nothing else."""

    reads_ahead = False

    def __init__(self, residency: Ints) -> None:
        self.residency = residency

    def fetch(self, layer_idx: int, expert_ids: Ints, *, prefill: bool) -> Iterator[Ints]:
        raise AssertionError("an expert is missing")

    def touched(self, layer_idx: int, expert_ids: Ints, *, prefill: bool = False) -> None:
        pass

    def touched_all(self, layer_idxs: list[int], expert_ids: Ints) -> None:
        pass

    def prefetch(self, layer_idx: int, expert_ids: Sequence[int]) -> None:
        pass

    def settle(self, committed_rows: Ints) -> None:
        pass


def decode(model: Transformer, llm: LLM, ids: Sequence[int], context: int) -> float:
    """Seconds for `ids`, one at a time, on a fresh cache."""
    cache, row = llm.load(context).new_cache(context), np.zeros(1, np.int64)
    began = time.perf_counter()
    for at, token_id in enumerate(ids):
        model.forward(cache, np.array([token_id]), np.array([at]), None, row, prefill=False)
        model.settle(row)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=DEMO_MODEL)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    context, rng = args.tokens + 16, np.random.default_rng(1)
    began = time.perf_counter()
    with LLM.open(args.model, EngineOptions(pin="off", usage_save=False), print) as llm:
        opened = time.perf_counter() - began
        loaded = llm.load(context)
        load_s = time.perf_counter() - began - opened
        store = loaded.store
        assert store is not None
        for layer_idx in llm.container.moe_layers:  # read everything
            every = np.arange(llm.spec.num_experts)[None]
            for _ in store.fetch(layer_idx, every, prefill=True):
                pass
        assert store.residency[list(llm.container.moe_layers)].all(), "the experts do not fit"
        plain = Transformer(llm.spec, loaded.model.weights, Addresses(store.residency), loaded.threads)
        ids = rng.integers(0, min(32_000, llm.spec.vocab_size), args.tokens).tolist()
        ratios, speeds = [], []
        for number in range(args.rounds + 1):
            pair = [loaded.model, plain] if number % 2 else [plain, loaded.model]
            seconds = {id(model): decode(model, llm, ids, context) for model in pair}
            if number:
                speeds.append(args.tokens / seconds[id(loaded.model)])
                ratios.append(seconds[id(plain)] / seconds[id(loaded.model)])
    print("| model | tok/s behind the store | of bare addresses (worst, median, best round) | open, s | load, s |")
    print("|---|---|---|---|---|")
    print(
        f"| {args.model.name} | {median(speeds):.1f} | {min(ratios):.3f}, {median(ratios):.3f}, {max(ratios):.3f} | "
        f"{opened:.2f} | {load_s:.2f} |"
    )


if __name__ == "__main__":
    main()
