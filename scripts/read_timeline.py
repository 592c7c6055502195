"""Where the time of reads goes while experts stream, beside a raw reader in short turns.

    python scripts/read_timeline.py CONTAINER --ram 4GB [--tokens 6] [--turns 20] [--calm 0.3] [-o TABLES.md]

First raw reads alone and while the decode kernel runs on one and on all threads, with the share of a processor that the
host took away ("steal"): on a virtual machine the disk's thread may live off the same processors.

Then one process decodes `--tokens` random ids in turns; raw reads of half a second stand before and after each turn.
`of raw`: what the store got while reads were wanted over the mean of the two. A turn counts only if all other processes
together used less than `--calm` of a processor. Milliseconds of a burst (from its first read until no read is wanted):
until the first read is in the kernel (start), with fewer in the kernel than wanted and readers are free for (late),
with 1, 2, 3 or more in it, and from the last byte until the store knows (told).
"""

from __future__ import annotations

import argparse
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

import numpy as np
from stage_bench import tell

from coli.kernels import activations, matmul
from coli.llm import LLM
from coli.loading import LoadedModel
from coli.options import EngineOptions
from coli.setting_values import parse_size
from coli.store.places import SlabPlaces
from coli.store.reader import ReaderThreads
from coli.tools.probe import disk_speed

RAW_SECONDS = 0.5
WARM_UP = 24
CONTEXT = 4096
PARTS = ("start", "late", "in 1", "in 2", "in 3", "in more", "told")


@dataclass
class Turns:
    """What the counted turns gave."""

    tokens_per_s: list[float] = field(default_factory=list)
    reading: list[float] = field(default_factory=list)  # bytes/s
    of_raw: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    bursts: list[dict[str, float]] = field(default_factory=list)


class Clock:
    """The readers' events: a read is wanted, in the kernel, out of it, counted."""

    def __init__(self, readers: ReaderThreads, places: SlabPlaces) -> None:
        self._events: list[tuple[float, str]] = []
        files, count = places._files, readers._count
        preadv = files._preadv

        def timed(fd: int, views: list[memoryview], offset: int) -> int:
            self._events.append((time.perf_counter(), "in"))
            got = preadv(fd, views, offset)
            self._events.append((time.perf_counter(), "out"))
            return got

        def counted(change: int) -> None:
            count(change)
            self._events.append((time.perf_counter(), "wanted" if change > 0 else "counted"))

        files._preadv, readers._count = timed, counted  # type: ignore[method-assign]
        self._threads = len(readers._threads)

    def take(self) -> list[dict[str, float]]:
        """The bursts since the last call: seconds by part, and the number of reads."""
        events, self._events = sorted(self._events), []
        bursts, burst, began = [], dict.fromkeys((*PARTS, "reads"), 0.0), 0
        wanted = inside = 0
        for i, (at, what) in enumerate(events):
            if wanted:
                more = min(self._threads, wanted)
                part = "told" if not inside else f"in {inside}" if inside < 4 else "in more"
                if not began:
                    part = "start"
                elif inside < more and began < burst["reads"]:
                    part = "late"
                burst[part] += at - events[i - 1][0]
            wanted += {"wanted": 1, "counted": -1}.get(what, 0)
            inside += {"in": 1, "out": -1}.get(what, 0)
            burst["reads"] += what == "wanted"
            began += what == "in"
            if what == "counted" and not wanted:
                bursts.append(burst)
                burst, began = dict.fromkeys((*PARTS, "reads"), 0.0), 0
        return bursts


class Others:
    """What other processes and the host took of the processors since the last look."""

    def __init__(self) -> None:
        self._seen = self._now()

    def look(self) -> tuple[float, float]:
        """(processors other processes used, processors the host took away) on average."""
        before, self._seen = self._seen, self._now()
        seconds, used, taken = (now - then for now, then in zip(self._seen, before, strict=True))
        return used / seconds, taken / seconds

    @staticmethod
    def _now() -> tuple[float, float, float]:
        user, nice, system, _, _, irq, soft, steal = map(int, Path("/proc/stat").read_text().split(None, 9)[1:9])
        hertz, own = os.sysconf("SC_CLK_TCK"), os.times()
        busy = (user + nice + system + irq + soft) / hertz - own.user - own.system
        return time.perf_counter(), busy, steal / hertz


def measure(args: argparse.Namespace) -> None:
    options = EngineOptions(memory_budget_bytes=parse_size(args.ram), io="direct", pin="off", usage_save=False)
    loaded = LLM.open(args.container, options, print).load(CONTEXT)
    store = loaded.store
    if store is None or not isinstance(store._places, SlabPlaces):
        raise SystemExit("expected a container with experts")
    store._places.toucher.wait()
    files = sorted({layout.path for layout in store._layouts.values()})
    record = max(layout.record_bytes for layout in store._layouts.values())

    def raw() -> float:
        return disk_speed(files, record, RAW_SECONDS).bytes_per_s

    head = (
        f"{time.strftime('%Y-%m-%d %H:%M')}, {args.container.name}, --ram {args.ram}, experts of {record / 1e6:.1f} MB"
    )
    tell(args, f"{head}, load average {os.getloadavg()[0]:.1f}\n\n{beside_computing(raw)}\n")
    turns = in_turns(args, loaded, Clock(store._readers, store._places), raw)
    parts = " | ".join(f"{part}, ms" for part in PARTS)
    tell(args, f"| turns | tok/s | GB/s while reading | of raw | waiting | reads a burst | {parts} |\n"
               "|" + "---|" * (6 + len(PARTS)))  # fmt: skip
    tell(args, row(turns))
    tell(args, f"\nload average at the end {os.getloadavg()[0]:.1f}\n")


def beside_computing(raw: Callable[[], float]) -> str:
    """Raw reads alone and beside a kernel on one and on all threads, in turns."""
    most = len(os.sched_getaffinity(0))
    kernel, others = Kernel(), Others()
    speeds: dict[int, list[float]] = {0: [], 1: [], most: []}
    steals: dict[int, list[float]] = {0: [], 1: [], most: []}
    for _ in range(6):
        for threads in speeds:
            others.look()
            with kernel.running(threads):
                speeds[threads].append(raw())
            steals[threads].append(others.look()[1])
    return "raw reads: " + "; ".join(
        f"{f'beside {threads} computing' if threads else 'alone'} {median(speeds[threads]) / 1e9:.2f} GB/s "
        f"({median(b / a for a, b in zip(speeds[0], speeds[threads], strict=True)):.0%}), steal "
        f"{median(steals[threads]):.2f}"
        for threads in speeds
    )


class Kernel:
    """The matrix product of one row over 75 MB of q4 weights, again and again."""

    def __init__(self) -> None:
        rows, groups, count = 4096, 64, 16
        tiles, kind = rows // 16, matmul.KIND_Q4
        each = tiles * groups * matmul.WEIGHT_BYTES[kind]
        self._weights, self._scales = activations.aligned(count * each), activations.aligned(rows * groups, np.float16)
        self._weights[:], self._scales[:] = 0x88, 1
        self._packed = activations.aligned(activations.x_bytes(kind, 1, groups))
        activations.pack_rows(np.ones((1, groups * 32), np.float32), np.zeros(1, np.int64), kind, self._packed)
        self._out, scales = activations.aligned(rows, np.float32), self._scales.ctypes.data
        self._each = [matmul.job_table(1) for _ in range(count)]
        for i, jobs in enumerate(self._each):
            jobs[0] = kind, self._weights.ctypes.data + i * each, scales, tiles, groups, 1, 0, 0, rows, 0

    @contextmanager
    def running(self, threads: int) -> Iterator[None]:
        """Inside this block it runs on so many threads; 0: it does not."""
        stop = threading.Event()

        def work() -> None:
            while threads and not stop.is_set():
                for jobs in self._each:
                    matmul.run_jobs(jobs, self._packed, self._out, threads)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def in_turns(args: argparse.Namespace, loaded: LoadedModel, clock: Clock, raw: Callable[[], float]) -> Turns:
    """Decode until there are `--turns` calm turns or five times as many were tried."""
    store, rng, others = loaded.store, random.Random(1), Others()
    assert store is not None
    cache = loaded.new_cache(CONTEXT)

    def decode(count: int) -> None:
        for _ in range(count):
            if cache.length == CONTEXT:
                cache.rewind(0)
            row, at = np.array([rng.randrange(32000)]), np.array([cache.length])
            loaded.model.forward(cache, row, at, None, np.zeros(1, np.int64), prefill=False)
            loaded.model.settle(np.zeros(1, np.int64))

    decode(WARM_UP)
    turns, raw_after = Turns(), raw()
    for _ in range(5 * args.turns):
        raw_before = raw_after
        if len(turns.of_raw) >= args.turns:
            break
        clock.take()
        others.look()
        before, began = store.stats(), time.perf_counter()
        decode(args.tokens)
        took, after = time.perf_counter() - began, store.stats()
        bursts, raw_after = clock.take(), raw()
        if others.look()[0] > args.calm or after.reading_s == before.reading_s:
            continue
        turns.bursts += bursts
        turns.tokens_per_s.append(args.tokens / took)
        turns.reading.append((after.bytes_read - before.bytes_read) / (after.reading_s - before.reading_s))
        turns.of_raw.append(2 * turns.reading[-1] / (raw_before + raw_after))
        turns.waiting.append((after.wait_s - before.wait_s) / took)
    return turns


def row(turns: Turns) -> str:
    if len(turns.of_raw) < 2:
        return f"| {len(turns.of_raw)} calm turns |" + " |" * (5 + len(PARTS))
    low, _, high = quantiles(turns.of_raw, n=4)
    count = len(turns.bursts)
    parts = " | ".join(f"{1000 * sum(burst[part] for burst in turns.bursts) / count:.2f}" for part in PARTS)
    return (
        f"| {len(turns.of_raw)} | {median(turns.tokens_per_s):.2f} | {median(turns.reading) / 1e9:.2f} | "
        f"{median(turns.of_raw):.0%} (half of them {low:.0%}-{high:.0%}) | {median(turns.waiting):.0%} | "
        f"{sum(burst['reads'] for burst in turns.bursts) / count:.1f} | {parts} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("container", type=Path)
    parser.add_argument("--ram", required=True, help="the budget, as coli's own --ram")
    parser.add_argument("--tokens", type=int, default=6)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--calm", type=float, default=0.3)
    parser.add_argument("-o", "--output", type=Path)
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
