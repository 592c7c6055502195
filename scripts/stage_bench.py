"""Where the time of prompts and of tokens goes, by context, while experts stream within a memory budget.

    python scripts/stage_bench.py CONTAINER --ram 4GB [--depths 0,7680] [--prompt 512] [--tokens 24] [-o TABLES.md]

At each depth a prompt of `--prompt` ids and then `--tokens` decoded ids, behind a real context of random ids, which is
computed once. Milliseconds an id: `attention` with its projections and the indexer, `experts`, `other` kernels, waiting
for reads, and the rest (`python`). `planned` is the band `coli plan` expects to be read for an id. A raw reader (direct
reads of one record's size, a second) stands before and after each test; `of raw` is what the store got while reads were
under way. `coli bench` gives the same shares for more combinations.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from coli.cli.report_lines import percent, size
from coli.loading import LoadedModel
from coli.options import EngineOptions
from coli.setting_values import parse_size
from coli.tools.bench import BenchOptions, Test, bench
from coli.tools.forecast import forecast
from coli.tools.probe import disk_speed
from coli.tools.sizes import model_sizes

WARM_UP = 8  # ids decoded before anything is kept
STAGES = ("attention", "experts", "other", "disk_wait", "python")
HEAD = ("test", "tok/s", *(f"{stage.replace('_', ' ')}, ms" for stage in STAGES), "hit rate", "read per id", "planned",
        "GB/s while reading", "of raw")  # fmt: skip


class Plan:
    """What `coli plan` expects of the model as it was loaded; bench asks it once for each test."""

    def __init__(self, path: Path) -> None:
        self.sizes = model_sizes(path)
        self.experts_bytes = 0

    def __call__(self, loaded: LoadedModel, test: Test) -> None:
        self.experts_bytes = min(loaded.plan.experts_bytes, self.sizes.experts_bytes)

    def read_per_id(self) -> str:
        """The band in bytes; the speeds it is asked with do not matter for this."""
        expected = forecast(self.sizes, self.experts_bytes, 1.0, 1.0)
        least, most = (self.sizes.cycle_bytes * (1 - hits) for hits in (expected.fast_hit_rate, expected.slow_hit_rate))
        return f"{size(least)} .. {size(most)}"


def measure(args: argparse.Namespace) -> None:
    plan = Plan(args.container)
    tests = [Test(0, WARM_UP, 0)]
    for depth in args.depths:
        tests += [Test(args.prompt, 0, depth), Test(0, args.tokens, depth)]
    options = BenchOptions(tuple(tests), (args.threads,), repetitions=1, warmup=False)
    engine = EngineOptions(memory_budget_bytes=parse_size(args.ram), io=args.io)
    began = time.monotonic()
    tell(
        args,
        f"{time.strftime('%Y-%m-%d %H:%M')}, {args.container.name}, --ram {args.ram}, {args.io}, load average "
        f"{os.getloadavg()[0]:.1f}\n\n| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD),
    )
    raw = raw_speed(plan)
    for test, result in zip(tests, bench(args.container, engine, options, notice, notice, forecast=plan), strict=True):
        before, raw = raw, raw_speed(plan)
        if test is not tests[0]:
            tell(args, row(test, result, plan, (before + raw) / 2))
    tell(
        args,
        f"\nexperts' memory {size(plan.experts_bytes)} of {size(plan.sizes.experts_bytes)}, peak "
        f"{size(result['peak_memory_bytes'])}; load average at the end {os.getloadavg()[0]:.1f}, "
        f"{time.monotonic() - began:.0f} s in all\n",
    )


def row(test: Test, result: dict[str, Any], plan: Plan, raw: float) -> str:
    """One line of the table."""
    milliseconds = [1000 * share / result["avg_ts"] for share in map(result["time_shares"].__getitem__, STAGES)]
    reading = result["reading_bytes_per_s"]
    cells = (
        test.name,
        f"{result['avg_ts']:.3g}",
        *(f"{each:.1f}" for each in milliseconds),
        percent(result["expert_hit_rate"]),
        size(result["bytes_per_token"]),
        plan.read_per_id() if test.n_gen else "-",
        "-" if reading is None else f"{reading / 1e9:.2f}",
        "-" if reading is None or not raw else f"{reading / raw:.0%}",
    )
    return "| " + " | ".join(cells) + " |"


def raw_speed(plan: Plan) -> float:
    """Bytes/s of a raw reader of records; 0 for a dense model."""
    if not plan.sizes.record_bytes:
        return 0.0
    return disk_speed(plan.sizes.files, max(plan.sizes.record_bytes.values()), 1.0).bytes_per_s


def notice(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def tell(args: argparse.Namespace, text: str) -> None:
    print(text, flush=True)
    if args.output:
        with args.output.open("a") as file:
            file.write(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("container", type=Path)
    parser.add_argument("--ram", required=True, help="the budget, as coli's own --ram")
    parser.add_argument("--depths", type=lambda text: sorted(map(int, text.split(","))), default=[0, 7680])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--io", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("-o", "--output", type=Path)
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
