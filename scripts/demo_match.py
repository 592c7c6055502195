"""Exact match of the built-in model through the engine: python scripts/demo_match.py [--samples N] [--model DIR].

Unseen samples of every task (seed 2026, as demo_eval.py takes them), greedy, whole answer equal. Needs no PyTorch.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from random import Random

import demo_data

from coli.builtin import DEMO_MODEL
from coli.llm import LLM
from coli.options import DraftOptions, EngineOptions, GenerateOptions

TOKENS = 400  # longer than any answer


def answered(llm: LLM, sample: demo_data.Sample) -> bool:
    """Whether the model's greedy answer is the only accepted one."""
    ids = llm.prompt_ids(sample.prompt)
    result = llm.generate(ids, GenerateOptions(max_tokens=TOKENS), DraftOptions(enabled=False)).result
    return result.text == sample.answer


def matches(llm: LLM, samples: int, seed: int = 2026) -> dict[str, float]:
    """Share of right answers by task."""
    found = {}
    for task, make in demo_data.TASKS.items():
        rng = Random(f"eval {seed} {task}")
        found[task] = sum(answered(llm, make(rng)) for _ in range(samples)) / samples
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=200, help="per task")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    args = parser.parse_args()
    began = time.perf_counter()
    with LLM.open(args.model, EngineOptions(pin="off", usage_save=False), lambda line: None) as llm:
        for task, share in matches(llm, args.samples, args.seed).items():
            print(f"{task:9} {share:7.1%}", flush=True)
    print(f"{args.samples} samples per task, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
