"""Models larger than RAM: coli's read modes, budgets and prefill chunks, a raw reader and llama.cpp, in memory cgroups.

    python scripts/stream_bench.py CONTAINER [--limit 6GiB] [--modes direct,pread,mmap] [--tokens 8] [--rounds 3]
        [--llama-python VENV/bin/python --gguf MODEL.gguf] [--budgets 2GiB,3GiB,...]
        [--chunks 512:128,...] [-o TABLES.md]

Needs root (it makes memory cgroups, version 1 or 2) and, for llama.cpp, an environment with llama-cpp-python. Every
engine is a process in a group of its own, limited to the same bytes, and decodes the same ids one at a time; in every
round each that fits beside the others measures once. The raw reader (direct I/O into huge pages, a second) stands
before and after each; "of raw" compares it with what the store got while reads were under way, for llama.cpp with all
the time; "planned" is the band `coli plan` expects to be read for a token. So ratios within a round count, absolute
speeds drift with the disk. `direct+prefetch` is a mode too. Then one process after the other: budgets (a limit each; a
prefill of 256 ids fills the store), and prompts in chunks (PROMPT:CHUNK pairs). Every table is printed, and added to
-o, as soon as it is complete. `--budgets none`, `--chunks none`, `--modes none` leave a part out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

WARM_UP = 6  # ids before the first round
WORKERS = Path(__file__).with_name("stream_workers.py")


class Group:
    """A memory cgroup; the process that writes its pid into it is limited with all its page cache."""

    def __init__(self, name: str, limit: int) -> None:
        first, second = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
        self.version = 1 if (first / "memory.limit_in_bytes").exists() else 2
        self.folder = (first if self.version == 1 else second) / f"coli-stream-{os.getpid()}-{name}"
        if self.version == 2:
            (second / "cgroup.subtree_control").write_text("+memory")
        self.folder.mkdir()
        (self.folder / ("memory.limit_in_bytes" if self.version == 1 else "memory.max")).write_text(str(limit))

    def enter(self) -> None:
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def peak_bytes(self) -> int:
        name = "memory.max_usage_in_bytes" if self.version == 1 else "memory.peak"
        return int((self.folder / name).read_text())

    def kills(self) -> int:
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        fields = dict(line.split() for line in (self.folder / name).read_text().splitlines())
        return int(fields.get("oom_kill", 0))

    def remove(self) -> None:
        for _ in range(50):
            try:
                self.folder.rmdir()
            except OSError:  # its last process is still ending
                time.sleep(0.1)
            else:
                return


class Engine:
    """A worker process in its group."""

    def __init__(self, name: str, python: str, arguments: Sequence[str], limit: int) -> None:
        self.name, self.group = name, Group(name.replace(" ", "-"), limit)
        self.rounds: list[dict[str, Any]] = []
        self.raw: list[float] = []  # bytes/s of the raw reader around each round
        self._process = subprocess.Popen(
            [python, WORKERS, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=self.group.enter,
        )  # fmt: skip
        try:
            self.start = self._answer()
        except BaseException:
            self.close()
            raise

    def ask(self, verb: str, count: int = 0) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{verb} {count}\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        if self._process.poll() is None:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self.group.remove()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit(f"{self.name}: ended with status {self._process.wait()}, {self.group.kills()} kills")


def bench(args: argparse.Namespace) -> None:
    """Run the parts one after the other; each writes its table when it has it."""
    from coli.cli.report_lines import size
    from coli.setting_values import parse_size
    from coli.store.container import Container

    container = Container.open(args.container)
    layouts = [container.expert_layout(i) for i in container.moe_layers]
    files, record = sorted({layout.path for layout in layouts}), max(layout.record_bytes for layout in layouts)
    began = time.monotonic()
    tell(
        args,
        f"{time.strftime('%Y-%m-%d %H:%M')}, {args.container.name}, {args.threads} threads, load average "
        f"{os.getloadavg()[0]:.1f}, experts {size(record)} each",
    )
    if args.modes:
        compare(args, files, record, parse_size(args.limit))
    budgets(args, [parse_size(text) for text in args.budgets])
    chunks(args, parse_size(args.limit))
    tell(args, f"load average at the end {os.getloadavg()[0]:.1f}, {time.monotonic() - began:.0f} s in all")


def compare(args: argparse.Namespace, files: Sequence[Path], record: int, limit: int) -> None:
    """Read modes and llama.cpp, as many at a time as the machine's free memory holds, the first two always."""
    import psutil

    from coli.cli.report_lines import size
    from coli.tools.probe import disk_speed

    ways = [(f"coli {mode}", sys.executable, ("coli", str(args.container), mode)) for mode in args.modes]
    if args.llama_python:
        ways.insert(1, ("llama.cpp mmap", args.llama_python, ("llama.cpp", str(args.gguf), "mmap")))
    together = max(2, int(psutil.virtual_memory().available * 0.95 / limit))
    context = WARM_UP + args.tokens * args.rounds + 64
    lines, speeds = [], []
    for start in range(0, len(ways), together):
        engines: list[Engine] = []
        raw: list[float] = []
        try:
            for name, python, arguments in ways[start : start + together]:
                engines.append(Engine(name, python, (*arguments, str(args.threads), str(context), "512"), limit))
                engines[-1].ask("decode", WARM_UP)
            raw.append(disk_speed(files, record, 1.0).bytes_per_s)
            for _ in range(args.rounds):
                for engine in engines:
                    engine.rounds.append(engine.ask("decode", args.tokens))
                    raw.append(disk_speed(files, record, 1.0).bytes_per_s)
                    engine.raw.append((raw[-2] + raw[-1]) / 2)
            rival = next((engine for engine in engines if engine.name.startswith("llama")), None)
            lines += [_row(engine, rival, args.tokens) for engine in engines]
            speeds += raw
        finally:
            for engine in engines:
                engine.close()
    tell(
        args,
        f"Decoding within {size(limit)} each, {args.tokens} ids a round, {args.rounds} rounds; raw direct reads "
        f"{size(median(speeds))}/s:\n\n"
        "| engine | tok/s | times llama.cpp | hit rate | read per token | planned | GB/s | while reading | of raw | "
        "waiting for reads | step / longer | replay / read | open, s | load, s | touch, s | resident at most | "
        "group's peak | killed |\n|" + "---|" * 18,
        *lines,
    )


def _row(engine: Engine, rival: Engine | None, count: int) -> str:
    from coli.cli.report_lines import percent, size

    rounds = engine.rounds
    seconds = [one["seconds"] for one in rounds]
    ratio = "-"
    if rival is not None:
        pairs = zip(rounds, rival.rounds, strict=True)
        ratio = f"{median(theirs['seconds'] / ours['seconds'] for ours, theirs in pairs):.2f}"
    rates = [one["bytes"] / one["seconds"] for one in rounds]
    reading = [one["bytes"] / (one["reading_s"] or one["seconds"]) for one in rounds]
    shares = [rate / speed for rate, speed in zip(reading, engine.raw, strict=True)]
    waits = [one["wait_s"] for one in rounds]
    waiting = "-" if None in waits else f"{sum(waits) / sum(seconds):.0%}"
    replayed = engine.ask("replay")["replayed"]
    hits = [one["hit_rate"] for one in rounds]
    planned = " .. ".join(map(size, engine.start["planned"] or [])) or "-"
    return (
        f"| {engine.name} | {count / median(seconds):.3f} | {ratio} | "
        f"{percent(median(hits)) if None not in hits else '-'} | "
        f"{size(median(one['bytes'] for one in rounds) / count)} | {planned} | "
        f"{median(rates) / 1e9:.2f} | "
        f"{median(reading) / 1e9:.2f} | {median(shares):.0%} ({min(shares):.0%}-{max(shares):.0%}) | "
        f"{waiting} | {_overlap(rounds)} | {'-' if replayed is None else f'{replayed:.3f}'} | "
        f"{engine.start['open_s']:.2f} | {engine.start['load_s']:.1f} | {engine.start['touch_s']:.1f} | "
        f"{size(rounds[-1]['resident'])} | {size(engine.group.peak_bytes())} | {engine.group.kills()} |"
    )


def _overlap(rounds: Sequence[dict[str, Any]]) -> str:
    """The steps' time over the longer of its two parts: reads under way, and everything but waiting for them."""
    if rounds[0]["reading_s"] is None:
        return "-"
    return f"{median(one['seconds'] / max(one['reading_s'], one['seconds'] - one['wait_s']) for one in rounds):.2f}"


def budgets(args: argparse.Namespace, limits: Sequence[int]) -> None:
    """Decoding at several limits in direct mode, the store filled by a prefill of 256 ids first."""
    from coli.cli.report_lines import percent, size

    if not limits:
        return
    context = 256 + 3 * args.tokens + 64
    head = (
        "| limit | tok/s | hit rate | read per token | GB/s while reading | waiting for reads | resident at most | "
        "group's peak | load, s | touch, s | killed |\n|"
    )
    tell(args, f"Budgets, direct, {2 * args.tokens} ids each:\n\n{head}" + "---|" * 11, more=True)
    for limit in limits:
        engine = None
        try:
            worker_args = ("coli", str(args.container), "direct", str(args.threads), str(context), "256")
            engine = Engine(f"budget {limit}", sys.executable, worker_args, limit)
            engine.ask("prefill", 256)
            engine.ask("decode", args.tokens)
            done = engine.ask("decode", 2 * args.tokens)
            reading = done["bytes"] / (done["reading_s"] or done["seconds"]) / 1e9
            row = (
                f"| {size(limit)} | {2 * args.tokens / done['seconds']:.3f} | {percent(done['hit_rate'])} | "
                f"{size(done['bytes'] / 2 / args.tokens)} | {reading:.2f} | {done['wait_s'] / done['seconds']:.0%} | "
                f"{size(done['resident'])} | {size(engine.group.peak_bytes())} | {engine.start['load_s']:.1f} | "
                f"{engine.start['touch_s']:.1f} | {engine.group.kills()} |"
            )
        except SystemExit as refused:
            if not isinstance(refused.code, str):  # a signal, not an engine that gave up
                raise
            row = f"| {size(limit)} | {refused} |" + " |" * 9
        finally:
            if engine is not None:
                engine.close()
        tell(args, row, more=True)
    tell(args)


def chunks(args: argparse.Namespace, limit: int) -> None:
    """Prompts in chunks of several sizes from a cold store."""
    from coli.cli.report_lines import size

    if not args.chunks:
        return
    head = "| prompt | chunk | tok/s | read | waiting for reads | step / longer | peak | killed |\n|" + "---|" * 8
    tell(args, f"Prefill by chunk, direct, within {size(limit)}:\n\n{head}", more=True)
    for pair in args.chunks:
        prompt, chunk = map(int, pair.split(":"))
        worker_args = ("coli", str(args.container), "direct", str(args.threads), str(prompt + 64), str(chunk))
        engine = None
        try:
            engine = Engine(f"chunk {prompt} {chunk}", sys.executable, worker_args, limit)
            done = engine.ask("prefill", prompt)
            seconds, waited = done["seconds"], done["wait_s"]
            peak, kills = engine.group.peak_bytes(), engine.group.kills()
            row = (
                f"| {prompt} | {chunk} | {prompt / seconds:.1f} | {size(done['bytes'])} | {waited / seconds:.0%} | "
                f"{seconds / max(done['reading_s'], seconds - waited):.2f} | {size(peak)} | {kills} |"
            )
        except SystemExit as refused:
            if not isinstance(refused.code, str):
                raise
            row = f"| {prompt} | {chunk} | {refused} | | | | | |"
        finally:
            if engine is not None:
                engine.close()
        tell(args, row, more=True)
    tell(args)


def tell(args: argparse.Namespace, *lines: str, more: bool = False) -> None:
    """A paragraph to standard output and the file; `more`: it goes on."""
    text = "\n".join(lines) + ("\n" if more else "\n\n")
    print(text, end="", flush=True)
    if args.output:
        with args.output.open("a") as file:
            file.write(text)


def _listed(text: str) -> list[str]:
    return [] if text == "none" else text.split(",")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("container", type=Path, nargs="?")
    parser.add_argument("--limit", default="6GiB")
    parser.add_argument("--modes", type=_listed, default=["direct", "pread", "mmap"])
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budgets", type=_listed, default=["2GiB", "3GiB", "4GiB", "6GiB", "10GiB", "14GiB", "20GiB"])
    parser.add_argument("--chunks", type=_listed, default=["512:128", "512:256", "512:512", "2048:512", "2048:2048"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--llama-python", type=shutil.which)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    if args.container is None or (args.llama_python is None) != (args.gguf is None):
        parser.error("expected CONTAINER, and --llama-python and --gguf together")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # groups and processes are ended
    bench(args)


if __name__ == "__main__":
    main()
