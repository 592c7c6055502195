"""What each `--gate` decides on recorded answers and simulated machines: the second table of docs/drafts.md.

    python scripts/simulate_gate.py [SMOL] [--demo coli/data/demo] [--answers FILE] [--seeds 5] > table.md

Answers each prompt of scripts/measure_gate.py without drafts, kept in FILE for the next time, and replays the drafting
on machines that exist only as costs: rows as measured (docs/benchmarks.md), noise of 20 % on each forward, a hiccup of
ten times in 200, the first forward of a row count dearer, 2 us for the drafting of a step. Nothing is remembered from
run to run and no clock is read, so a busy machine changes nothing. Printed: geometric mean over --seeds of the speed
over plain decoding on the same noise, and tokens/forward. --drafting prints instead what the drafting itself takes,
microseconds of this thread's processor time per emitted id.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from math import exp, log
from pathlib import Path
from statistics import mean

from coli.drafts.costs import MAX_ROWS, RowCosts
from coli.drafts.gate import Gate
from coli.drafts.gated import TreeSources
from coli.drafts.opening import Drafter, SourceLibrary
from coli.llm import LLM
from coli.options import EngineOptions
from coli.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "scripts"), str(ROOT / "tests")]
from drafts.simulated_machine import Machine, noisy, preparing, simulate  # noqa: E402
from gate_prompts import Group, groups  # noqa: E402
from measure_gate import GATES, Bench  # noqa: E402

# rows: plain forwards
COSTS = {
    "smol": {1: 1.0, 2: 1.18, 4: 1.6, 8: 2.45, 12: 3.3, 16: 5.15, 17: 6.0},
    "demo": {1: 1.0, 2: 1.31, 5: 1.35, 8: 1.6, 12: 1.9, 17: 2.5},
    "streaming": {1: 1.0, 2: 1.55, 3: 1.6, 4: 2.45, 8: 2.9, 17: 3.2},
}
PREPARING = {"smol": 1.3, "demo": 10.0, "streaming": 1.0}  # plain forwards
PLAIN_S = {"smol": 0.009, "demo": 0.0003, "streaming": 0.006}
DRAFTING_S = 2e-6  # what the drafting of a step is said to take
NOISE = 0.2


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt with the answer that was recorded."""

    kind: str
    group: Group
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    vocab_size: int
    tokenizer: Tokenizer

    def sources(self, gate: str) -> Drafter:
        """Fresh ones: grammars remember what earlier answers of their library did."""
        library = SourceLibrary(self.vocab_size, lambda: "", lambda notice: None, self.tokenizer)
        return library.sources(replace(self.group.drafts, gate=gate))


class Recorder(Bench):
    """Answers without drafts, each asked of the model only once."""

    def __init__(self, model: Path, known: dict[str, list[int]]) -> None:
        super().__init__(model, EngineOptions(pin="off", usage_save=False), once=True)
        self._known = known

    def plain_ids(self, group: Group) -> tuple[int, ...]:
        key = f"{self.model.name}, {group.tokens}, {group.raw}: {group.prompt}"
        if key not in self._known:
            self._known[key] = list(super().plain_ids(group))
        return tuple(self._known[key])


def recorded(model: Path, kind: str, folder: Path, tokens: int, known: dict[str, list[int]]) -> list[Case]:
    """Every prompt of a model, with all sources and each alone."""
    cases = []
    with Recorder(model, known) as bench:
        chosen = groups(bench.plain_ids, kind == "demo", folder, tokens, [])
        with LLM.open(model, EngineOptions(), lambda notice: None) as llm:
            for group in chosen:
                answer = bench.plain_ids(group)
                ids = tuple(llm.prompt_ids(group.prompt, raw=group.raw))
                cases.append(Case(kind, group, ids, answer, llm.spec.vocab_size, llm.tokenizer))
    return cases


def curve(points: dict[int, float]) -> list[float]:
    """Costs of 0..MAX_ROWS rows: straight between what was measured, and on as it rose at last."""
    found = [1.0, 1.0]
    for (left, low), (right, high) in pairwise(points.items()):
        found += [low + (high - low) * (rows - left) / (right - left) for rows in range(left + 1, right + 1)]
    slope = (found[-1] - found[-9]) / 8
    return found + [found[-1] + slope * (rows + 1) for rows in range(MAX_ROWS + 1 - len(found))]


def machine(name: str, seed: int) -> Machine:
    costs = curve(COSTS[name])
    return noisy(preparing(lambda rows, at: PLAIN_S[name] * costs[rows], PREPARING[name]), seed, NOISE)


def drafter(case: Case, gate: str, streams: bool) -> Drafter:
    """A gate that knows nothing, and no real clock."""
    sources = case.sources(gate)
    if gate == "seed":
        return sources
    fresh = Gate(RowCosts(cycle_bytes=1000)) if gate == "auto" else None
    ticks = count()  # two intervals a step are measured
    clock = lambda: DRAFTING_S / 2 * next(ticks)  # noqa: E731
    made = TreeSources(sources.sources, vocab_size=case.vocab_size, gate=fresh, clock=clock)
    if streams:
        read = iter(range(0, 1 << 40, 500))
        made.expert_bytes = lambda: next(read)
    return made


def speed(case: Case, name: str, gate: str, seed: int) -> tuple[float, float]:
    """(speed over plain decoding, tokens/forward)."""
    tokens = len(case.answer)
    plain = machine(name, seed)
    plain_s = sum(plain(1, at) for at in range(tokens - 1))
    truth = [*case.prompt, *case.answer]
    outcome = simulate(drafter(case, gate, name == "streaming"), case.prompt, truth, tokens, machine(name, seed))
    assert outcome.emitted == list(case.answer)
    return plain_s / outcome.seconds, tokens / outcome.forwards


def geometric(values: Sequence[float]) -> float:
    return exp(mean(map(log, values)))


def table(cases: Sequence[Case], seeds: int, gates: Sequence[str]) -> None:
    streaming = (f"streaming: `{gate}`" if gate == gates[0] else f"`{gate}`" for gate in gates)
    print("| model | prompt | " + " | ".join((*(f"`{gate}`" for gate in gates), *streaming)) + " |")
    print("|" + "---|" * (2 + 2 * len(gates)), flush=True)
    means: dict[tuple[str, str], list[float]] = {}
    for case in cases:
        cells = [case.kind, case.group.name]
        for name in (case.kind, "streaming"):
            for gate in gates:
                found = [speed(case, name, gate, seed) for seed in range(seeds)]
                ratio, depth = geometric([one for one, _ in found]), mean(other for _, other in found)
                cells.append(f"{ratio:.2f} ({depth:.2f})" if gate == "auto" else f"{ratio:.2f}")
                means.setdefault((name, gate), []).append(ratio)
        print("| " + " | ".join(cells) + " |", flush=True)
    for name in COSTS:
        if (name, gates[0]) not in means:
            continue
        cells = [f"{geometric(means[name, gate]):.3f}" for gate in gates]
        print(f"| {name} | geometric mean | " + " | ".join(cells) + " |", flush=True)


def least_seconds(made: Callable[[], Drafter], case: Case) -> float:
    """Processor time of one simulated answer, the least of nine: others on the machine only ever add to it."""
    found = []
    for _ in range(9):
        drafts, costs = made(), machine(case.kind, 0)
        began = time.thread_time()
        simulate(drafts, case.prompt, [*case.prompt, *case.answer], len(case.answer), costs)
        found.append(time.thread_time() - began)
    return min(found)


def drafting(cases: Sequence[Case], gates: Sequence[str]) -> None:
    """Processor time of the drafting alone."""
    print("| model | prompt | " + " | ".join(f"`{gate}`, us an id" for gate in gates) + " |")
    print("|" + "---|" * (2 + len(gates)), flush=True)
    for case in cases:
        cells = [case.kind, case.group.name]
        for gate in gates:
            fresh = Gate() if gate == "auto" else None
            without = least_seconds(lambda: TreeSources([], vocab_size=1 << 30, gate=fresh), case)  # noqa: B023
            took = least_seconds(lambda: drafter(case, gate, False), case) - without  # noqa: B023
            cells.append(f"{1e6 * took / len(case.answer):.1f}")
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", help="SmolLM2 as MoE, converted")
    parser.add_argument("--demo", type=Path, default=ROOT / "coli" / "data" / "demo")
    parser.add_argument("--answers", type=Path, help="where answers are kept")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--gate", action="append", default=[], choices=GATES, help="only these")
    parser.add_argument("--drafting", action="store_true")
    args = parser.parse_args()
    known: dict[str, list[int]] = {}
    if args.answers and args.answers.exists():
        known = json.loads(args.answers.read_text())
    with tempfile.TemporaryDirectory() as name:
        cases = [] if args.model is None else recorded(args.model, "smol", Path(name), args.tokens, known)
        cases += recorded(args.demo, "demo", Path(name), args.tokens, known)
        if args.answers:
            args.answers.write_text(json.dumps(known))
        chosen = args.gate or list(GATES)
        if args.drafting:
            drafting(cases, chosen)
        else:
            table(cases, args.seeds, chosen)
    return 0


if __name__ == "__main__":
    sys.exit(main())
