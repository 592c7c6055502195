"""Cache policies on the demo model's own routes, at budgets of 10 to 90 % of its experts.

    python scripts/demo_policies.py [--samples 24] [--seed 1]

The model answers texts of demo_data's generators, all in one trace. The first half only fills the caches and teaches
`pinned` and `lfru` what is used; hits are counted on the second half: other texts of other tasks' seeds. Two orders:
`mixed`, tasks alternate; `shift`, the halves hold different tasks, so that what is learnt on one is judged on another.
"""

from __future__ import annotations

import argparse
from random import Random

import demo_data

from coli.builtin import DEMO_MODEL
from coli.llm import LLM
from coli.options import DraftOptions, EngineOptions, GenerateOptions
from coli.tools.replay import POLICIES, compare
from coli.tools.trace import Trace, TraceRecorder, traced_model

SHARES = (10, 20, 30, 40, 50, 60, 70, 80, 90)


def texts(order: str, samples: int, seed: int) -> list[str]:
    """Prompts: `samples` of the learning half, then as many of the judged one."""
    names = list(demo_data.TASKS)
    halves = [names, names] if order == "mixed" else [names[: len(names) // 2], names[len(names) // 2 :]]
    found = []
    for half, tasks in enumerate(halves):
        rng = Random(f"policies {seed} {half}")
        found += [demo_data.TASKS[tasks[n % len(tasks)]](rng).prompt for n in range(samples)]
    return found


def record(prompts: list[str]) -> Trace:
    """One trace of plain greedy answers to all prompts."""
    recorder = TraceRecorder()
    options = EngineOptions(pin="off", usage_save=False, context=2048)
    with LLM.open(DEMO_MODEL, options, lambda line: None, trace=recorder) as llm:
        for prompt in prompts:
            for _ in llm.generate(llm.prompt_ids(prompt), GenerateOptions(max_tokens=160), DraftOptions(enabled=False)):
                pass
        store = llm.load(1).store
        assert store is not None
        model = traced_model(llm.container, llm.spec.num_stored_layers, llm.spec.num_experts_per_tok)
        return recorder.trace(model, store.policy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=24, help="texts in each half")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--order", choices=["mixed", "shift"], action="append", help="default: both")
    options = parser.parse_args()
    for order in options.order or ("mixed", "shift"):
        trace = record(texts(order, options.samples, options.seed))
        capacities = [trace.model.experts_bytes * share // 100 for share in SHARES]
        rates = {(r.capacity_bytes, r.policy): r.counts.hit_rate for r in compare(trace, POLICIES, capacities)}
        print(f"{order}: {trace.tokens} decode rows, hits of decode unions in percent\n")
        print(f"| budget | {' | '.join(POLICIES)} |")
        print("|---" * (len(POLICIES) + 1) + "|")
        for share, capacity in zip(SHARES, capacities, strict=True):
            cells = [f"{100 * rates[capacity, policy]:.1f}" for policy in POLICIES]
            print(f"| {share} % | {' | '.join(cells)} |")
        print()


if __name__ == "__main__":
    main()
