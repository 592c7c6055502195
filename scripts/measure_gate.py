"""What each `--gate` costs and gains on a real model, as markdown tables for docs/drafts.md.

    python scripts/measure_gate.py SMOL [--demo coli/data/demo] [--only GROUP ...] [--rounds 3] > table.md
    python scripts/measure_gate.py MODEL --never-slower resident|third|SIZE [--rounds 3]
    python scripts/measure_gate.py MODEL --merged [--rounds 2]
    python scripts/measure_gate.py --cost MODEL ... > costs.md

The first form: seven prompts, each without drafts and with the gates always, seed and auto, on two models, with all
experts in memory and with a third of them (CAP). Every run loads the model anew in this process, so that it records
its tapes as a new process would; kernels and page cache are warm. The order off, always, seed, auto, off again is
repeated --rounds times and a run is compared with the mean of the two plain runs around it, so that a slow change of
the machine falls out. `auto` keeps its costs in one file per model and budget: its first run starts without any.
With a third of the experts there is one round less, no source alone, and SMOL has a third of the tokens. --open-once
loads a model that is slow to load only once per budget; its gate then goes on from run to run. The demo model
comes first; what has not begun after --minutes (14) is left out and named, so the whole takes 15 at most.

--never-slower: novel prose, a near-miss corpus, a wrong grammar and a perfect corpus on one model, with all experts in
memory, a third of them, or as many as SIZE (as --ram) holds; --merged: NDJSON, code edit, replay and a repeated
question with all sources and each alone, `seed` (the order of priority) and `auto`. Each ends in a line that says what
the medians come to. --cpu takes seconds of this thread's processor time, on one thread, for a machine that is busy.

The last form: what a forward of 1..17 rows costs and how many distinct experts it uses, all experts in memory and
with a third of them; about a minute a model.

Ids that differ from plain decoding's are marked and make the exit code 1.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from coli.llm import LLM
from coli.options import DraftOptions, EngineOptions, GenerateOptions
from coli.setting_values import parse_size

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gate_prompts import Group, groups
from measure_drafts import PROSE

GATES = ("always", "seed", "auto")


@dataclass(frozen=True, slots=True)
class Run:
    """What one response came to."""

    ids: tuple[int, ...]
    report: dict[str, Any]
    cpu_s: float | None = None  # of the thread, if that is what counts

    @property
    def seconds(self) -> float:
        """Of decoding one token."""
        return 1 / float(self.report["decode_tps"]) if self.cpu_s is None else self.cpu_s / len(self.ids)


class Bench:
    """Answers of one model and budget, loaded anew for each as a new process would, or only once."""

    def __init__(self, model: Path, engine: EngineOptions, once: bool, cpu: bool = False) -> None:
        self.model, self.engine, self._once, self._cpu = model, engine, once, cpu
        self._open: LLM | None = None

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *error: object) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def plain_ids(self, group: Group) -> tuple[int, ...]:
        """Without drafts."""
        return self.answer(group, DraftOptions(enabled=False)).ids

    def answer(self, group: Group, drafts: DraftOptions) -> Run:
        llm = self._open = self._open or LLM.open(self.model, self.engine, lambda notice: None)
        try:
            ids = llm.prompt_ids(group.prompt, raw=group.raw)
            tokens = min(group.tokens, llm.spec.max_position_embeddings - len(ids) - 1)
            llm.load(len(ids) + tokens)
            began = time.thread_time()
            result = llm.generate(ids, GenerateOptions(tokens, ignore_eos=True), drafts).result
            return Run(result.token_ids, result.report, time.thread_time() - began if self._cpu else None)
        finally:
            if not self._once:
                self.__exit__()


def a_third(model: Path) -> int:
    """Expert slots per layer for a third of the experts, at least what one row uses of them less a quarter."""
    with LLM.open(model, EngineOptions(), lambda notice: None) as llm:
        return max(1, llm.spec.num_experts // 3)


Medians = dict[tuple[str, str], float]  # prompt, gate -> speed over plain decoding


def measure(
    bench: Bench, label: str, chosen: Sequence[Group], gates: Sequence[str], rounds: int, deadline: float
) -> tuple[bool, Medians]:
    """Print the rows of one model and budget. Returns whether all ids were plain decoding's, and the medians."""
    same, medians = True, Medians()
    off = DraftOptions(enabled=False)
    for group in chosen:
        if time.monotonic() > deadline:
            print(f"out of time: {label}, {group.name} not measured", file=sys.stderr)
            continue
        ratios: dict[str, list[float]] = {gate: [] for gate in gates}
        last: dict[str, Run] = {}
        fastest = dict.fromkeys(gates, float("inf"))
        equal = dict.fromkeys(gates, True)
        before = bench.answer(group, off)
        plain = [before.seconds]
        for _ in range(rounds):
            runs = {gate: bench.answer(group, replace(group.drafts, gate=gate)) for gate in gates}
            after = bench.answer(group, off)
            for gate, run in runs.items():
                ratios[gate].append((before.seconds + after.seconds) / 2 / run.seconds)
                equal[gate] = equal[gate] and run.ids == before.ids == after.ids
                last[gate] = run
                fastest[gate] = min(fastest[gate], run.seconds)
            before = after
            plain.append(after.seconds)
        noise = max(plain) / min(plain)
        cells = [label, group.name, f"{len(before.ids)}", f"{1 / median(plain):.1f} ({noise:.2f})"]
        for gate in gates:
            low, high = min(ratios[gate]), max(ratios[gate])
            medians[group.name, gate] = median(ratios[gate])
            mark = "" if equal[gate] else " **other ids**"
            cells.append(
                f"**{median(ratios[gate]):.2f}** ({low:.2f}-{high:.2f}) {min(plain) / fastest[gate]:.2f} / "
                f"{last[gate].report['tokens_per_forward']:.2f}{mark}"
            )
        cells.append(gate_cell(last[gates[-1]].report, before.report))
        print("| " + " | ".join(cells) + " |", flush=True)
        same = same and all(equal.values())
    return same, medians


def verdicts(medians: Medians, merged: bool) -> list[str]:
    """What the medians come to: the worst of each gate, or merged prompts beside the best source alone."""
    if not merged:
        worst: dict[str, tuple[float, str]] = {}
        for (name, gate), speed in medians.items():
            worst[gate] = min(worst.get(gate, (speed, name)), (speed, name))
        return [f"worst of `{gate}`: {speed:.3f} ({name})" for gate, (speed, name) in worst.items()]
    lines = []
    for (name, gate), speed in medians.items():
        whole, _, what = name.partition(", ")
        alone = [
            (other, found)
            for (found, by), other in medians.items()
            if by == gate and found.startswith(f"{whole}, ") and found.endswith(" alone")
        ]
        if alone and what and not what.endswith(" alone"):
            best, best_name = max(alone)
            lines.append(f"{whole}, `{gate}`: merged {speed:.2f}, best alone {best:.2f} ({best_name})")
    return lines


def gate_cell(auto: dict[str, Any], plain: dict[str, Any]) -> str:
    """What the gate did in its last run."""
    found = auto["drafting"]
    if "probes" not in found:
        return ""
    text = f"{found['drafted']} drafted, {found['declined_forwards']} declined, {found['probes']} probes"
    if found["closed"]:
        text += f", closed {found['closed']}x"
    if plain["bytes_per_token"] > 1000:
        text += f"; {plain['bytes_per_token'] / 1e6:.2f} -> {auto['bytes_per_token'] / 1e6:.2f} MB read a token"
    return text


def gates(args: argparse.Namespace) -> bool:
    """The first table."""
    columns = (
        "model",
        "prompt",
        "ids",
        "plain tok/s (max/min)",
        *(f"`{gate}`" for gate in args.gate),
        "auto, last run",
    )
    print(
        "Speed over plain decoding: **median** (range), fastest over fastest plain run / tokens/forward, last round.\n"
    )
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns), flush=True)
    same, deadline = True, time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = [(args.demo, True), (args.model[0], False)]
        if args.never_slower or args.merged:
            models = [(args.model[0], args.model[0].resolve() == args.demo.resolve())]
        for model, demo in models:
            if (demo and args.no_demo) or (not demo and args.no_smol):
                continue
            parts = budgets(args, model, demo)
            if not parts:
                continue
            with Bench(model, replace(parts[0][1], pin="off", usage_save=False), args.open_once) as bench:
                chosen = groups(bench.plain_ids, demo, folder, args.tokens, args.only)
            for label, engine, rounds, divisor in parts:
                title = f"{model.name}, {args.label or label}"
                shorter = [replace(group, tokens=group.tokens // divisor) for group in chosen]
                if engine.cap and not (args.never_slower or args.merged):
                    shorter = [group for group in shorter if "alone" not in group.name or "replay" in group.name]
                kept = {"usage": folder / f"{demo}-usage.json", "gate_file": folder / f"{demo}-{engine.cap}.json"}
                engine = replace(engine, pin="off", threads=1 if args.cpu else None, **kept)
                with Bench(model, engine, args.open_once, args.cpu) as bench:
                    equal, medians = measure(bench, title, shorter, args.gate, rounds, deadline)
                same = same and equal
                if args.never_slower or args.merged:
                    print("\n" + "\n".join(verdicts(medians, args.merged)), flush=True)
    return same


def budgets(args: argparse.Namespace, model: Path, demo: bool) -> list[tuple[str, EngineOptions, int, int]]:
    """Label, options, rounds and what the number of tokens is divided by, of each."""
    resident = "resident", EngineOptions(), args.rounds, 1
    if args.merged or args.never_slower == "resident":
        return [resident]
    third = a_third(model)
    label, options = f"{third} experts a layer", EngineOptions(cap=third)
    if args.never_slower == "third":
        return [(label, options, args.rounds, 1)]
    if args.never_slower:
        ram = parse_size(args.never_slower)
        return [(f"--ram {args.never_slower}", EngineOptions(memory_budget_bytes=ram), args.rounds, 1)]
    both = [resident, (label, options, max(1, args.rounds - 1), 1 if demo else 3)]
    return [one for one in both if one[0].startswith(args.budget)]


def costs(model: Path, rounds: int) -> None:
    """Print the rows of one model: cost and distinct experts of 1..17 rows."""
    for label, cap in (("all", None), ("a third", a_third(model))):
        options = EngineOptions(pin="off", usage_save=False, cap=cap)
        with LLM.open(model, options, lambda notice: None) as llm:
            prompt = llm.prompt_ids(PROSE)
            plain = llm.generate(prompt, GenerateOptions(160, ignore_eos=True), DraftOptions(enabled=False)).result
            ids = [*prompt, *plain.token_ids]
            loaded = llm.load(len(ids))
            cache, start = loaded.new_cache(len(ids)), len(prompt)
            at = np.arange(start, dtype=np.int64)
            loaded.model.forward(cache, np.array(ids[:start]), at, None, at[:0], prefill=True)
            counts = list(range(1, 18))
            seconds: dict[int, list[float]] = {rows: [] for rows in counts}
            distinct: dict[int, list[int]] = {rows: [] for rows in counts}
            read: dict[int, list[int]] = {rows: [] for rows in counts}
            for turn in range(rounds + 1):
                # once through the text with all row counts, in an order that changes: as decoding meets experts
                cache.rewind(start)
                for rows in [*counts[turn % 17 :], *counts[: turn % 17]]:
                    before, began = loaded.store_counters(), time.perf_counter()
                    forward(loaded, cache, ids, rows)
                    took, used = time.perf_counter() - began, loaded.store_counters().since(before)
                    if turn:  # the first time tapes are recorded
                        seconds[rows].append(took)
                        distinct[rows].append(used.hits + used.misses)
                        read[rows].append(used.bytes_read)
            layers = max(1, len(llm.container.moe_layers))
            of = f"{llm.spec.num_experts_per_tok} of {llm.spec.num_experts}"
        plain_s = median(seconds[1])
        for name, cells in (
            ("ms", [f"{1000 * median(seconds[rows]):.1f}" for rows in seconds]),
            ("plain forwards", [f"{median(seconds[rows]) / plain_s:.2f}" for rows in seconds]),
            (f"distinct experts a layer ({of})", [f"{np.mean(distinct[rows]) / layers:.1f}" for rows in seconds]),
            ("MB read", [f"{np.mean(read[rows]) / 1e6:.1f}" for rows in seconds]),
        ):
            if name != "MB read" or cap is not None:
                print(f"| {model.name}, {label} | {name} | " + " | ".join(cells) + " |", flush=True)


def forward(loaded: Any, cache: Any, ids: Sequence[int], rows: int) -> None:
    """The next `rows` ids of the text as one verify that is right to its end."""
    base = cache.length
    at = np.arange(base, base + rows, dtype=np.int64)
    every = np.arange(rows, dtype=np.int64)
    loaded.model.forward(cache, np.array(ids[base : base + rows]), at, None, every, prefill=False)
    loaded.model.settle(every)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="+", type=Path, help="converted models; the first form takes one")
    parser.add_argument("--cost", action="store_true", help="the second form")
    demo = Path(__file__).resolve().parent.parent / "coli" / "data" / "demo"
    parser.add_argument("--demo", type=Path, default=demo)
    parser.add_argument("--no-demo", action="store_true")
    parser.add_argument("--no-smol", action="store_true", help="the demo model only")
    names = ("prose", "near-miss", "wrong", "perfect", "ndjson", "alone", "code", "questions")
    parser.add_argument("--only", action="append", default=[], choices=names)
    parser.add_argument("--budget", default="", help="resident, or how many experts a layer: only this budget")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=14.0)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--gate", action="append", default=[], choices=GATES, help="only these")
    parser.add_argument("--open-once", action="store_true", help="one process for all runs of a budget, as a server")
    parser.add_argument("--label", default="", help="what to call the budget")
    parser.add_argument("--never-slower", metavar="BUDGET", default="", help="resident, third or a size")
    parser.add_argument("--merged", action="store_true", help="what merging gives beside each source alone")
    parser.add_argument("--cpu", action="store_true", help="this thread's processor seconds, one thread")
    args = parser.parse_args()
    if args.never_slower:
        args.only = args.only or ["prose", "near-miss", "wrong", "perfect"]
    elif args.merged:
        args.only = [*(args.only or ["perfect", "ndjson", "code", "questions"]), "alone"]
        args.gate = args.gate or ["seed", "auto"]
    args.gate = args.gate or list(GATES)
    if not args.cost:
        return 0 if gates(args) else 1
    print("| model, experts in memory | rows | " + " | ".join(str(rows) for rows in range(1, 18)) + " |")
    print("|" + "---|" * 19, flush=True)
    for model in args.model:
        costs(model, args.rounds * 7)
    return 0


if __name__ == "__main__":
    sys.exit(main())
