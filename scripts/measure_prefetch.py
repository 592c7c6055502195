"""What `--prefetch` is worth: alternating answers with and without it, experts streaming.

    python scripts/measure_prefetch.py [MODEL] [--cap 10] [--io direct,pread] [--rounds 9] [--tokens 120]

MODEL is a container (default: the demo model), `--cap` the experts a layer may hold. All answers have the same ids.
Counts do not depend on the load; of the speeds the ratio within a round counts. The first round warms up.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any

from coli.builtin import DEMO_MODEL
from coli.llm import LLM
from coli.options import DraftOptions, EngineOptions, GenerateOptions, SamplerOptions

PROMPT = "Three orders as JSON."


def measure(path: Path, io: str, cap: int, rounds: int, tokens: int) -> dict[bool, list[dict[str, Any]]]:
    """Reports of the rounds by whether guesses were read ahead."""
    engines = {
        ahead: EngineOptions(io=io, cap=cap, prefetch=ahead, pin="off", usage_save=False) for ahead in (False, True)
    }
    models = {ahead: LLM.open(path, options, lambda line: None) for ahead, options in engines.items()}
    answer = GenerateOptions(tokens, ignore_eos=True, sampler=SamplerOptions(seed=1))
    reports: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for number in range(rounds + 1):
        for ahead in (False, True) if number % 2 else (True, False):
            llm = models[ahead]
            done = llm.generate(llm.prompt_ids(PROMPT), answer, DraftOptions(enabled=False)).result
            reports[ahead].append(done.report)
    assert len({tuple(report["token_ids"]) for both in reports.values() for report in both}) == 1
    for llm in models.values():
        llm.close()
    return {ahead: both[1:] for ahead, both in reports.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=DEMO_MODEL)
    parser.add_argument("--cap", type=int, default=10)
    parser.add_argument("--io", default="direct,pread")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=120)
    args = parser.parse_args()
    print("| way | tok/s | of plain (worst, median, best) | hit rate | read per token | read ahead, used | waiting |")
    print("|---|---|---|---|---|---|---|")
    for io in args.io.split(","):
        reports = measure(args.model, io, args.cap, args.rounds, args.tokens)
        for ahead, rounds in reports.items():
            last, speeds = rounds[-1], [report["decode_tps"] for report in rounds]
            pairs = sorted(speed / plain["decode_tps"] for speed, plain in zip(speeds, reports[False], strict=True))
            waiting = median(report["time_s"]["disk_wait"] / sum(report["time_s"].values()) for report in rounds)
            print(
                f"| {io}{', prefetch' if ahead else ''} | {median(speeds):.1f} | "
                f"{pairs[0]:.2f}, {median(pairs):.2f}, {pairs[-1]:.2f} | {last['expert_hit_rate']:.1%} | "
                f"{last['bytes_per_token'] / 1e3:.0f} kB | {last['prefetch']['reads']}, {last['prefetch']['used']} | "
                f"{waiting:.0%} |"
            )


if __name__ == "__main__":
    main()
