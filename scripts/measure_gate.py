"""What each `--gate` costs and gains on a real model, as markdown tables for docs/drafts.md.

    python scripts/measure_gate.py SMOL [--demo coli/data/demo] [--only GROUP ...] [--rounds 3] > table.md
    python scripts/measure_gate.py MODEL --never-slower resident|third|SIZE [--rounds 3]
    python scripts/measure_gate.py MODEL --merged [--rounds 3] [--minutes 5]
    python scripts/measure_gate.py --cost MODEL ... > costs.md

The first form: seven prompts, each without drafts and with the gates always, seed and auto, on two models, with all
experts in memory and with a third of them (CAP). Every run loads the model anew in this process, so that it records
its tapes as a new process would; kernels and page cache are warm. A round is plain, always, seed, auto, plain again;
the next one begins one place later and goes backwards, and so on, so that no place and no neighbour is one gate's own.
A run is compared with the mean of its round's plain runs, and these with each other: "plain over plain" is what the
measure itself errs by. `auto` keeps its costs in one file per model and budget: its first run starts without any.
With a third of the experts there is one round less, no source alone, and SMOL has a third of the tokens. --open-once
loads a model that is slow to load only once per budget; its gate then goes on from run to run. The demo model
comes first; what has not begun after --minutes (14) is left out and named, so the whole takes 15 at most.

--never-slower: novel prose, a near-miss corpus, a wrong grammar and a perfect corpus on one model, with all experts in
memory, a third of them, or as many as SIZE (as --ram) holds. Ends in a line with the worst median of each gate.
--merged: NDJSON, code edit, replay and a repeated question with each source alone, all in order of priority (`seed`)
and all merged (`auto`), in turn. Rounds begin as long as there are minutes. Ends in a line per prompt that compares
merged with the best source alone. --cpu takes this thread's processor seconds, on one thread, for a busy machine.

The last form: what a forward of 1..17 rows costs and how many distinct experts it uses, all experts in memory and
with a third of them; about a minute a model.

Ids that differ from plain decoding's are marked and make the exit code 1.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
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
MINUTES, MERGED_MINUTES = 14.0, 5.0
OTHER = " **other ids**"


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

    def answer(self, group: Group, drafts: DraftOptions, tokens: int | None = None) -> Run:
        """tokens: fewer than the group's."""
        llm = self._open = self._open or LLM.open(self.model, self.engine, lambda notice: None)
        try:
            ids = llm.prompt_ids(group.prompt, raw=group.raw)
            most = min(group.tokens, llm.spec.max_position_embeddings - len(ids) - 1)
            llm.load(len(ids) + most)
            began = time.thread_time()
            options = GenerateOptions(min(most, tokens or most), ignore_eos=True)
            result = llm.generate(ids, options, drafts).result
            return Run(result.token_ids, result.report, time.thread_time() - began if self._cpu else None)
        finally:
            if not self._once:
                self.__exit__()


def a_third(model: Path) -> int:
    """Expert slots per layer for a third of the experts, at least what one row uses of them less a quarter."""
    with LLM.open(model, EngineOptions(), lambda notice: None) as llm:
        return max(1, llm.spec.num_experts // 3)


Runs = dict[str, list[Run]]  # by variant, one a round
PLAIN, AGAIN = "plain", "plain again"  # the same; what lies between them is the measure's own error


def alternate(bench: Bench, prompt: Group, variants: Mapping[str, DraftOptions], rounds: int, deadline: float) -> Runs:
    """The prompt once a round without drafts, with each of `variants`, and again without.

    Each round begins one place later than the one before, and every second one goes backwards: who follows whom, and
    what grows or fades over the rounds, falls on all alike. One short run before the first is not counted.
    """
    off = DraftOptions(enabled=False)
    every = {PLAIN: off, **variants, AGAIN: off}
    runs: Runs = {name: [] for name in every}
    bench.answer(prompt, off, tokens=16)
    for turn in range(rounds):
        if turn and time.monotonic() > deadline:
            break
        names = list(every)
        names = names[turn % len(names) :] + names[: turn % len(names)]
        for name in reversed(names) if turn % 2 else names:
            runs[name].append(bench.answer(prompt, every[name]))
    return runs


def over_plain(runs: Runs, name: str) -> list[float]:
    """Speeds of a variant over the mean of its round's plain runs; of AGAIN over the other plain run."""
    plain = zip(runs[PLAIN], runs[AGAIN] if name != AGAIN else runs[PLAIN], strict=True)
    return [(a.seconds + b.seconds) / 2 / run.seconds for (a, b), run in zip(plain, runs[name], strict=True)]


def spread(ratios: Sequence[float]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def same_ids(runs: Runs, name: str) -> bool:
    return {run.ids for run in runs[name]} == {runs[PLAIN][0].ids}


def plain_cells(runs: Runs) -> list[str]:
    """Ids, plain tokens/s, and plain over plain."""
    plain = [run.seconds for run in runs[PLAIN] + runs[AGAIN]]
    return [
        f"{len(runs[PLAIN][0].ids)}",
        f"{1 / median(plain):.1f} ({max(plain) / min(plain):.2f})",
        spread(over_plain(runs, AGAIN)),
    ]


Medians = dict[tuple[str, str], tuple[float, str]]  # prompt, gate -> speed over plain decoding, and of plain over plain


def measure(
    bench: Bench, label: str, chosen: Sequence[Group], gates: Sequence[str], rounds: int, deadline: float
) -> tuple[bool, Medians]:
    """Print the rows of one model and budget. Returns whether all ids were plain decoding's, and the medians."""
    same, medians = True, Medians()
    for group in chosen:
        if time.monotonic() > deadline:
            print(f"out of time: {label}, {group.name} not measured", file=sys.stderr)
            continue
        variants = {gate: replace(group.drafts, gate=gate) for gate in gates}
        runs = alternate(bench, group, variants, rounds, deadline)
        fastest = min(run.seconds for run in runs[PLAIN] + runs[AGAIN])
        cells = [label, group.name, *plain_cells(runs)]
        for gate in gates:
            ratios, equal = over_plain(runs, gate), same_ids(runs, gate)
            medians[group.name, gate] = median(ratios), spread(over_plain(runs, AGAIN))
            best = fastest / min(run.seconds for run in runs[gate])
            last = runs[gate][-1].report["tokens_per_forward"]
            cells.append(f"**{spread(ratios)}** {best:.2f} / {last:.2f}" + ("" if equal else OTHER))
            same = same and equal
        cells.append(gate_cell(runs[gates[-1]][-1].report, runs[PLAIN][-1].report))
        print("| " + " | ".join(cells) + " |", flush=True)
    return same, medians


def merged(bench: Bench, label: str, chosen: Sequence[Group], rounds: int, deadline: float) -> bool:
    """Print a row per prompt and way to draft: each source alone, all in order of priority, all merged.

    Each prompt has its share of the time. Returns whether all ids were plain decoding's.
    """
    same, lines = True, []
    print("| model | prompt | drafts | tokens/forward | tok/s | speed over plain decoding |\n|" + "---|" * 6)
    for at, group in enumerate(chosen):
        prompt = group.name.partition(", ")[0]
        only = alone(group.drafts)
        variants = {
            **only,
            "priority order": replace(group.drafts, gate="seed"),
            "merged": replace(group.drafts, gate="auto"),
        }
        share = (deadline - time.monotonic()) / (len(chosen) - at)
        runs = alternate(bench, group, variants, rounds, time.monotonic() + share)
        for name in (*variants, AGAIN):
            depths = [run.report["tokens_per_forward"] for run in runs[name]]
            speed = f"{1 / median(run.seconds for run in runs[name]):.1f}"
            ratio = spread(over_plain(runs, name)) + ("" if same_ids(runs, name) else OTHER)
            print(f"| {label} | {prompt} | {name} | {spread(depths)} | {speed} | {ratio} |", flush=True)
            same = same and same_ids(runs, name)
        taken = {name: median(run.seconds for run in runs[name]) for name in variants}
        best = min(only, key=taken.__getitem__)
        pairs = zip(runs["merged"], runs[best], strict=True)
        beside = spread([one.seconds / ours.seconds for ours, one in pairs])
        ratio = f"{taken[best] / taken['merged']:.2f}"
        lines.append(f"{prompt}, {len(runs[PLAIN])} rounds: merged over {best}: {ratio}, by rounds {beside}")
    print("\n" + "\n".join(lines), flush=True)
    return same


def alone(drafts: DraftOptions) -> dict[str, DraftOptions]:
    """Each source of `drafts` by itself, under the measured gate."""
    none = DraftOptions(draft=0, gate="auto")
    found = {
        "grammar alone": drafts.grammar and replace(none, grammar=drafts.grammar),
        "corpus alone": drafts.corpus and replace(none, corpus=drafts.corpus),
        "n-gram alone": drafts.draft and replace(none, draft=drafts.draft),
    }
    return {name: options for name, options in found.items() if options}


def verdicts(medians: Medians) -> list[str]:
    """What the medians come to: the worst of each gate, beside plain over plain of the same rounds."""
    worst: dict[str, tuple[float, str, str]] = {}
    for (name, gate), (speed, error) in medians.items():
        worst[gate] = min(worst.get(gate, (speed, name, error)), (speed, name, error))
    return [
        f"worst of `{gate}`: {speed:.3f} ({name}; plain over plain in the same rounds {error})"
        for gate, (speed, name, error) in worst.items()
    ]


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
        "plain over plain",
        *(f"`{gate}`" for gate in args.gate),
        "auto, last run",
    )
    if not args.merged:
        print("Speed over plain: **median** (range), fastest over fastest plain run / tokens/forward, last round.\n")
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
                    if args.merged:
                        several = [group for group in shorter if len(alone(group.drafts)) > 1]
                        same = merged(bench, title, several, rounds, deadline)
                        continue
                    equal, medians = measure(bench, title, shorter, args.gate, rounds, deadline)
                same = same and equal
                if args.never_slower:
                    print("\n" + "\n".join(verdicts(medians)), flush=True)
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
    parser.add_argument("--minutes", type=float)
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
    args.gate = args.gate or list(GATES)
    if args.minutes is None:
        args.minutes = MERGED_MINUTES if args.merged else MINUTES
    if not args.cost:
        return 0 if gates(args) else 1
    print("| model, experts in memory | rows | " + " | ".join(str(rows) for rows in range(1, 18)) + " |")
    print("|" + "---|" * 19, flush=True)
    for model in args.model:
        costs(model, args.rounds * 7)
    return 0


if __name__ == "__main__":
    sys.exit(main())
