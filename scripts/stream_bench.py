"""Decoding a model that does not fit: coli's read modes, a raw reader and llama.cpp, each in a memory cgroup, in turns.

    python scripts/stream_bench.py CONTAINER [--limit 6GiB] [--modes direct,pread,mmap] [--tokens 8] [--rounds 3]
                                   [--llama-python VENV/bin/python --gguf MODEL.gguf]

Needs root (it makes memory cgroups, version 1 or 2) and, for llama.cpp, an environment with llama-cpp-python. Every
engine is a process in a group of its own, limited to the same bytes, and decodes the same ids one at a time; in every
round each measures once, and the raw reader reads records at random with direct I/O between them. So ratios within a
round count, absolute speeds drift with the disk. Takes about (engines x tokens x rounds x seconds a token).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

WARM_UP = 6  # ids before the first round


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


class Coli:
    """coli's forward, one id at a time."""

    def __init__(self, path: str, mode: str, threads: int, context: int) -> None:
        import numpy as np

        from coli.llm import LLM
        from coli.options import EngineOptions

        self._np = np
        options = EngineOptions(threads=threads, io=mode, pin="off", usage_save=False)
        began = time.perf_counter()
        self._llm = LLM.open(Path(path), options, lambda line: print(f"coli: {line}", file=sys.stderr))
        self.open_s = time.perf_counter() - began
        self._loaded = self._llm.load(context)
        self.load_s = time.perf_counter() - began - self.open_s
        self._cache = self._loaded.new_cache(context)
        self.vocab_size = self._llm.spec.vocab_size

    def run(self, ids: Sequence[int]) -> dict[str, Any]:
        np, before = self._np, self._loaded.store_counters()
        for token_id in ids:
            at = np.array([self._cache.length], np.int64)
            first = np.zeros(1, np.int64)
            self._loaded.model.forward(self._cache, np.array([token_id], np.int64), at, None, first, prefill=False)
            self._loaded.model.settle(first)
        counted = self._loaded.store_counters().since(before)
        return {"hit_rate": counted.hit_rate(), "bytes": counted.bytes_read, "wait_s": counted.wait_s}


class LlamaCpp:
    """llama.cpp through llama-cpp-python: the file mapped, as it does by default; no repacked copy."""

    open_s = load_s = 0.0

    def __init__(self, path: str, mode: str, threads: int, context: int) -> None:
        from llama_cpp import Llama, llama_cpp

        params = llama_cpp.llama_model_default_params()
        params.use_extra_bufts = False  # else every weight is copied, rearranged, into memory
        llama_cpp.llama_model_default_params = lambda: params
        self._llama = Llama(path, n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False)
        self.vocab_size = self._llama.n_vocab()

    def run(self, ids: Sequence[int]) -> dict[str, Any]:
        before = _bytes_read()
        for token_id in ids:
            self._llama.eval([token_id])
        return {"hit_rate": None, "bytes": _bytes_read() - before, "wait_s": None}


def _bytes_read() -> int:
    """What this process caused to be read from disks."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def worker(engine: str, path: str, mode: str, threads: int, context: int) -> None:
    """Decode as many ids as each line of standard input says; one JSON object a line back."""
    model = (Coli if engine == "coli" else LlamaCpp)(path, mode, threads, context)
    rng = random.Random(1)
    print(json.dumps({"open_s": model.open_s, "load_s": model.load_s}), flush=True)
    for line in sys.stdin:
        ids = [rng.randrange(min(model.vocab_size, 32000)) for _ in range(int(line))]
        began = time.perf_counter()
        counted = model.run(ids)
        print(json.dumps({"seconds": time.perf_counter() - began, **counted}), flush=True)


class Engine:
    """A worker process in its group."""

    def __init__(self, name: str, python: str, arguments: Sequence[str], limit: int) -> None:
        self.name, self.group = name, Group(name.replace(" ", "-"), limit)
        self.rounds: list[dict[str, Any]] = []
        self._process = subprocess.Popen(
            [python, __file__, "--worker", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=self.group.enter,
        )  # fmt: skip
        self.start = self._answer()

    def decode(self, count: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
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
    """Run it all and print the table."""
    from coli.cli.report_lines import size
    from coli.setting_values import parse_size
    from coli.store.container import Container
    from coli.tools.probe import disk_speed

    limit = parse_size(args.limit)
    container = Container.open(args.container)
    layouts = [container.expert_layout(i) for i in container.moe_layers]
    files, record = sorted({layout.path for layout in layouts}), max(layout.record_bytes for layout in layouts)
    context = WARM_UP + args.tokens * args.rounds + 64
    ways = [(f"coli {mode}", sys.executable, ("coli", str(args.container), mode)) for mode in args.modes]
    if args.llama_python:
        ways.append(("llama.cpp mmap", args.llama_python, ("llama.cpp", str(args.gguf), "mmap")))
    raw: list[float] = []
    engines: list[Engine] = []
    try:
        for name, python, arguments in ways:
            engines.append(Engine(name, python, (*arguments, str(args.threads), str(context)), limit))
            engines[-1].decode(WARM_UP)
            print(f"{name}: opened in {engines[-1].start['open_s']:.2f} s", file=sys.stderr)
        for _ in range(args.rounds):
            raw.append(disk_speed(files, record, 2.0).bytes_per_s)
            for engine in engines:
                engine.rounds.append(engine.decode(args.tokens))
        print(
            f"{args.container.name}, limit {size(limit)} each, {args.threads} threads, {args.tokens} ids a round, "
            f"{args.rounds} rounds;\nraw direct reads of {size(record)}: {size(median(raw))}/s; "
            f"load average {os.getloadavg()[0]:.1f}\n"
        )
        print("| engine | tok/s | ratio to the last | hit rate | read per token | GB/s | of raw | peak | killed |")
        print("|---|---|---|---|---|---|---|---|---|")
        for engine in engines:
            print(_row(engine, engines[-1], raw, args.tokens))
    finally:
        for engine in engines:
            engine.close()


def _row(engine: Engine, last: Engine, raw: Sequence[float], count: int) -> str:
    from coli.cli.report_lines import percent, size

    seconds = [one["seconds"] for one in engine.rounds]
    ratios = [theirs["seconds"] / ours["seconds"] for ours, theirs in zip(engine.rounds, last.rounds, strict=True)]
    rates = [one["bytes"] / one["seconds"] for one in engine.rounds]
    shares = [rate / speed for rate, speed in zip(rates, raw, strict=True)]
    hits = [one["hit_rate"] for one in engine.rounds]
    return (
        f"| {engine.name} | {count / median(seconds):.3f} | {median(ratios):.2f} | "
        f"{percent(median(hits)) if None not in hits else '-'} | "
        f"{size(median(one['bytes'] for one in engine.rounds) / count)} | {median(rates) / 1e9:.2f} | "
        f"{median(shares):.0%} | {size(engine.group.peak_bytes())} | {engine.group.kills()} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("container", type=Path, nargs="?")
    parser.add_argument("--limit", default="6GiB")
    parser.add_argument("--modes", type=lambda text: text.split(","), default=["direct", "pread", "mmap"])
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--llama-python", type=shutil.which)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        engine, path, mode, threads, context = args.worker
        worker(engine, path, mode, int(threads), int(context))
        return
    if args.container is None or (args.llama_python is None) != (args.gguf is None):
        parser.error("expected CONTAINER, and --llama-python and --gguf together")
    bench(args)


if __name__ == "__main__":
    main()
