"""What each `--gate` costs and gains on a real model, as markdown tables for docs/drafts.md.

    python scripts/measure_gate.py SMOL [--demo coli/data/demo] [--only GROUP ...] [--rounds 3] > table.md
    python scripts/measure_gate.py --cost MODEL ... > costs.md

The first form: seven prompts, each without drafts and with the gates always, seed and auto, on two models, with all
experts in memory and with a third of them (CAP). Every run loads the model anew in this process, so that it records
its tapes as a new process would; kernels and page cache are warm. The order off, always, seed, auto, off again is
repeated --rounds times and a run is compared with the mean of the two plain runs around it, so that a slow change of
the machine falls out. `auto` keeps its costs in one file per model and budget: its first run starts without any.
With a third of the experts there is one round less, no source alone, and SMOL has a third of the tokens. --open-once
loads a model that is slow to load only once per budget; its gate then goes on from run to run. The demo model
comes first; what has not begun after --minutes (14) is left out and named, so the whole takes 15 at most.

The second form: what a forward of 1..17 rows costs and how many distinct experts it uses, all experts in memory and
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

sys.path.insert(0, str(Path(__file__).resolve().parent))
from measure_drafts import GRAMMARS, ORDERS, PROSE, SEA, WRONG, line, near_misses

GATES = ("always", "seed", "auto")
CODE = """Rename the function `area` to `surface` in this module and change nothing else.

```python
import math


def area(shape, width, height):
    if shape == "circle":
        return math.pi * (width / 2) ** 2
    if shape == "triangle":
        return width * height / 2
    return width * height


def total(shapes):
    result = 0
    for shape, width, height in shapes:
        result += area(shape, width, height)
    return result


def largest(shapes):
    return max(area(shape, width, height) for shape, width, height in shapes)
```

The module with the new name:

```python
import math


def surface(shape"""
DEMO_ORDERS = (
    "order 17 from Anna Keller, paid, total 49, gift wrap. order 18 for Omar Haddad, shipped, high priority, total "
    "120, call first. order 19 for Lucy Brown, open, total 15. order 20 from Ivan Petrov, cancelled, total 230."
)
DEMO_EVENT = "team meeting with Nora Quist in Oslo on 3 May 2026 at 14:30, bring the budget. "
DEMO_LOG = "error at 12:04:55 in the billing service on host web-17: connection refused after 3 retries"


@dataclass(frozen=True, slots=True)
class Group:
    """One prompt and the sources drafts come from, as options."""

    name: str
    prompt: str
    raw: bool
    drafts: DraftOptions
    tokens: int


@dataclass(frozen=True, slots=True)
class Run:
    """What one response came to."""

    ids: tuple[int, ...]
    report: dict[str, Any]

    @property
    def seconds(self) -> float:
        """Of decoding one token."""
        return 1 / float(self.report["decode_tps"])


class Bench:
    """Answers of one model and budget, loaded anew for each as a new process would, or only once."""

    def __init__(self, model: Path, engine: EngineOptions, once: bool) -> None:
        self.model, self.engine, self._once = model, engine, once
        self._open: LLM | None = None

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *error: object) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def answer(self, group: Group, drafts: DraftOptions) -> Run:
        llm = self._open = self._open or LLM.open(self.model, self.engine, lambda notice: None)
        try:
            ids = llm.prompt_ids(group.prompt, raw=group.raw)
            tokens = min(group.tokens, llm.spec.max_position_embeddings - len(ids) - 1)
            result = llm.generate(ids, GenerateOptions(tokens, ignore_eos=True), drafts).result
            return Run(result.token_ids, result.report)
        finally:
            if not self._once:
                self.__exit__()


def groups(bench: Bench, demo: bool, folder: Path, tokens: int, only: Sequence[str]) -> list[Group]:
    """The chosen groups of a model, with the corpora they need frozen from its own answers."""
    prose, orders = (DEMO_EVENT, DEMO_ORDERS) if demo else (PROSE, ORDERS)
    kind = "demo" if demo else "smol"
    grammar = GRAMMARS / "ndjson-order.gbnf"

    answers: dict[tuple[str, int], tuple[int, ...]] = {}

    def frozen(name: str, prompt: str, raw: bool, count: int, wrong: bool = False) -> Path:
        group = Group(name, prompt, raw, DraftOptions(), count)
        if (prompt, count) not in answers:
            answers[prompt, count] = bench.answer(group, DraftOptions(enabled=False)).ids
        ids = answers[prompt, count]
        path = folder / f"{kind}-{name}.txt"
        path.write_text(line(near_misses(ids) if wrong else ids))
        return path

    def wanted(name: str) -> bool:
        return not only or name in only

    found: list[Group] = []
    ngram = DraftOptions(draft=8)
    if wanted("prose"):
        found.append(Group("novel prose", prose, False, ngram, tokens))
    if wanted("near-miss"):
        corpus = frozen("near", prose, False, tokens, wrong=True)
        found.append(Group("near-miss corpus", prose, False, DraftOptions(corpus=corpus, draft=0), tokens))
    if wanted("wrong"):
        (folder / "wrong.gbnf").write_text(WRONG)
        wrong = DraftOptions(grammar=folder / "wrong.gbnf", draft=0)
        found.append(Group("wrong grammar", orders, not demo, wrong, tokens))

    def merged(name: str, prompt: str, raw: bool, count: int, *, more: str = "", **sources: DraftOptions) -> None:
        """All sources at once, and each alone."""
        alone = "alone" in only or not only
        together = DraftOptions(draft=8)
        for drafts in sources.values():
            together = replace(together, corpus=drafts.corpus or together.corpus)
            together = replace(together, grammar=drafts.grammar or together.grammar)
        found.append(Group(name + more, prompt, raw, together, count))
        for source, drafts in {**sources, "n-gram": ngram}.items() if alone else ():
            found.append(Group(f"{name}, {source} alone", prompt, raw, drafts, count))

    if wanted("perfect"):
        corpus = DraftOptions(corpus=frozen("perfect", prose, False, tokens), draft=0)
        found.append(Group("replay, corpus alone", prose, False, corpus, tokens))
        if "alone" in only or not only:
            found.append(Group("replay, corpus and n-gram", prose, False, replace(corpus, draft=8), tokens))
    if wanted("ndjson"):
        other = orders.replace("Anna", "Peter").replace("Lucy", "Jane")
        corpus = DraftOptions(corpus=frozen("related", other, not demo, 160), draft=0)
        forced = DraftOptions(grammar=grammar, draft=0)
        merged("NDJSON", orders, not demo, tokens, more=", all sources", grammar=forced, corpus=corpus)
    if wanted("code"):
        name, text = ("log line", DEMO_LOG) if demo else ("code edit", CODE)
        corpus = DraftOptions(corpus=frozen("code", text.replace("surface", "extent"), True, tokens // 2), draft=0)
        merged(name, text, True, tokens, more=", corpus of another and n-gram", corpus=corpus)
    if wanted("questions"):
        first, second = (DEMO_LOG, DEMO_LOG.replace("17", "23")) if demo else (SEA, SEA.replace("Tell", "Please tell"))
        corpus = DraftOptions(corpus=frozen("question", first, False, tokens // 2), draft=0)
        merged("repeated question", second, False, tokens // 2, more=", corpus and n-gram", corpus=corpus)
    return found


def a_third(model: Path) -> int:
    """Expert slots per layer for a third of the experts, at least what one row uses of them less a quarter."""
    with LLM.open(model, EngineOptions(), lambda notice: None) as llm:
        return max(1, llm.spec.num_experts // 3)


def measure(
    bench: Bench, label: str, chosen: Sequence[Group], gates: Sequence[str], rounds: int, deadline: float
) -> bool:
    """Print the rows of one model and budget. Returns whether all ids were plain decoding's."""
    same = True
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
            mark = "" if equal[gate] else " **other ids**"
            cells.append(
                f"**{median(ratios[gate]):.2f}** ({low:.2f}-{high:.2f}) {min(plain) / fastest[gate]:.2f} / "
                f"{last[gate].report['tokens_per_forward']:.2f}{mark}"
            )
        cells.append(gate_cell(last[gates[-1]].report, before.report))
        print("| " + " | ".join(cells) + " |", flush=True)
        same = same and all(equal.values())
    return same


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
        for model, demo in ((args.demo, True), (args.model[0], False)):
            if (demo and args.no_demo) or (not demo and args.no_smol):
                continue
            plain = EngineOptions(pin="off", usage_save=False)
            with Bench(model, plain, args.open_once) as bench:
                chosen = groups(bench, demo, folder, args.tokens, args.only)
            third = a_third(model)
            for label, engine, rounds, divisor in (
                ("resident", EngineOptions(), args.rounds, 1),
                (f"{third} experts a layer", EngineOptions(cap=third), max(1, args.rounds - 1), 1 if demo else 3),
            ):
                if args.budget and not label.startswith(args.budget):
                    continue
                title = f"{model.name}, {args.label or label}"
                shorter = [replace(group, tokens=group.tokens // divisor) for group in chosen]
                if engine.cap:
                    shorter = [group for group in shorter if "alone" not in group.name or "replay" in group.name]
                kept = {"usage": folder / f"{demo}-usage.json", "gate_file": folder / f"{demo}-{engine.cap}.json"}
                with Bench(model, replace(engine, pin="off", **kept), args.open_once) as bench:
                    same = measure(bench, title, shorter, args.gate, rounds, deadline) and same
    return same


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
    args = parser.parse_args()
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
