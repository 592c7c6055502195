"""Requests that decode together: total tokens per second, experts and bytes per token, and whether anybody starves.

    python scripts/serve_bench.py [MODEL] [--cap N] [--io direct] [--tokens 128] [--rounds 3]

Drives the server's engine thread without HTTP: 1, 2, 4 and 8 different requests at once, no drafts, a warm-up round
before the measured ones; prints one line per round and a table of medians. Experts
and bytes are those of decoding; MODEL: a container, else the built-in one.
"""

import argparse
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from coli.builtin import DEMO_MODEL
from coli.llm import LLM
from coli.options import DraftOptions, EngineOptions, GenerateOptions, SamplerOptions
from coli.server.worker import Done, Event, Failed, Job, Piece, Worker

CROWDS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Figures:
    """One crowd: everything per token of all its answers."""

    tps: float
    experts: float  # distinct experts asked for
    read: float  # bytes of those that were not in memory
    hit_rate: float
    first_s: float  # until the last of them had its first text
    gap_s: float  # the longest anybody waited between two pieces of text
    spread: float  # seconds of the slowest answer by those of the fastest


class Answer:
    """Hears one job."""

    def __init__(self, over: threading.Semaphore) -> None:
        self.times, self.over, self.tokens = [time.perf_counter()], over, 0

    def __call__(self, event: Event) -> None:
        self.times.append(time.perf_counter())
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Done):
            self.tokens = len(event.token_ids)
        if not isinstance(event, Piece):
            self.over.release()


def crowd(worker: Worker, llm: LLM, count: int, tokens: int, salt: int) -> Figures:
    over, answers = threading.Semaphore(0), []
    before, began = worker.glance(), time.perf_counter()
    assert before is not None
    for at in range(count):
        text = f"List as NDJSON. Orders: {at + 2} lamps for customer {salt}-{at} at {20 + at} each."
        sampler = SamplerOptions(temperature=0.7, seed=100 * salt + at)
        options = GenerateOptions(max_tokens=tokens, ignore_eos=True, sampler=sampler)
        answers.append(Answer(over))
        worker.submit(Job(llm.prompt_ids(text), options, answers[-1]))
    for _ in range(count):
        over.acquire()
    seconds, after = time.perf_counter() - began, worker.glance()
    assert after is not None
    total = sum(answer.tokens for answer in answers)
    record_bytes = llm.container.expert_layout(llm.container.moe_layers[0]).record_bytes
    hits = after.hits - before.hits
    asked = hits + after.misses - before.misses
    took = [answer.times[-1] - answer.times[0] for answer in answers]
    return Figures(
        tps=total / seconds,
        experts=asked / total,
        read=(asked - hits) * record_bytes / total,
        hit_rate=hits / asked,
        first_s=max(answer.times[1] - answer.times[0] for answer in answers),
        gap_s=max(late - early for a in answers for early, late in zip(a.times[1:], a.times[2:], strict=False)),
        spread=max(took) / min(took),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Requests that decode together.")
    parser.add_argument("model", nargs="?", type=Path, default=DEMO_MODEL)
    parser.add_argument("--cap", type=int, help="experts kept a layer")
    parser.add_argument("--io", default="auto", choices=("auto", "mmap", "pread", "direct"))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    engine = EngineOptions(cap=args.cap, io=args.io, pin="off", usage_save=False, gate_save=False)
    with LLM.open(args.model, engine, print) as llm:
        worker = Worker(llm, DraftOptions(enabled=False), context=512, slots=max(CROWDS), queue=0)
        worker.start()
        crowd(worker, llm, max(CROWDS), max(8, args.tokens // 4), 9)
        found: dict[int, list[Figures]] = {count: [] for count in CROWDS}
        for salt in range(args.rounds):
            for count in CROWDS:
                figures = crowd(worker, llm, count, args.tokens, salt)
                found[count].append(figures)
                print(count, figures, flush=True)
        worker.stop()
    print(
        "\n| requests | tok/s | experts per token | MB read per token | hit rate | first text | longest wait | spread |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for count, rounds in found.items():
        middle = {name: statistics.median(getattr(each, name) for each in rounds) for name in Figures.__annotations__}
        print(
            f"| {count} | {middle['tps']:.1f} | {middle['experts']:.1f} | {middle['read'] / 1e6:.3f} "
            f"| {middle['hit_rate']:.1%} | {middle['first_s']:.2f} s | {middle['gap_s']:.2f} s "
            f"| {middle['spread']:.2f} |"
        )


if __name__ == "__main__":
    main()
