"""coli and llama.cpp side by side on one GGUF file, in alternating runs.

    python scripts/compare_llamacpp.py MODEL.gguf --llama-python VENV/bin/python [--threads 1,2] [--depth 0,4096]

Needs llama-cpp-python in some environment (`pip install llama-cpp-python` builds it from PyPI) and coli in this one.
MODEL.gguf is converted first (--container keeps the result). Both engines stay loaded, one measures while the other
waits, and each round measures both: memory speed drifts by the minute, so only ratios within a round mean anything.
Tests are llama-bench's: ppN computes N random ids in one go, tgN N times one id, both behind `depth` ids of context.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

CHUNK = 512  # ids of one prefill batch, in both engines


class Engine(Protocol):
    """What a worker measures."""

    vocab_size: int

    def seek(self, depth: int, ids: Sequence[int]) -> None:
        """Make the context `depth` ids long, computing only what is not there."""

    def run(self, ids: Sequence[int], single: bool) -> float:
        """Seconds for `ids`, at once or one by one; the context is as before afterwards."""


class Coli:
    """coli's forward on a converted model."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        import numpy as np

        from coli.llm import LLM
        from coli.options import EngineOptions

        self._np = np
        self._llm = LLM.open(Path(path), EngineOptions(threads=threads, usage_save=False), _note)
        self.vocab_size = self._llm.spec.vocab_size
        self._loaded = self._llm.load(context)
        self._cache = self._loaded.new_cache(context)

    def seek(self, depth: int, ids: Sequence[int]) -> None:
        if self._cache.length > depth:
            self._cache.rewind(depth)
        for at in range(self._cache.length, depth, CHUNK):
            self._forward(ids[at : min(at + CHUNK, depth)], prefill=True)

    def run(self, ids: Sequence[int], single: bool) -> float:
        depth, step = self._cache.length, 1 if single else CHUNK
        started = time.perf_counter()
        for at in range(0, len(ids), step):
            self._forward(ids[at : at + step], prefill=not single)
        seconds = time.perf_counter() - started
        self._cache.rewind(depth)
        return seconds

    def _forward(self, ids: Sequence[int], prefill: bool) -> None:
        np, start = self._np, self._cache.length
        rows = np.array([len(ids) - 1], np.int64)
        positions = np.arange(start, start + len(ids), dtype=np.int64)
        self._loaded.model.forward(self._cache, np.array(ids, np.int64), positions, None, rows, prefill=prefill)
        self._loaded.model.settle(np.arange(len(ids), dtype=np.int64))


class LlamaCpp:
    """llama.cpp through llama-cpp-python."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        from llama_cpp import Llama

        self._llama = Llama(
            path,
            n_ctx=context,
            n_batch=CHUNK,
            n_ubatch=CHUNK,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )
        self.vocab_size = self._llama.n_vocab()

    def seek(self, depth: int, ids: Sequence[int]) -> None:
        self._llama.n_tokens = min(self._llama.n_tokens, depth)
        if self._llama.n_tokens < depth:
            self._llama.eval(ids[self._llama.n_tokens : depth])

    def run(self, ids: Sequence[int], single: bool) -> float:
        depth = self._llama.n_tokens
        started = time.perf_counter()
        for at in range(0, len(ids), 1 if single else len(ids)):
            self._llama.eval(ids[at : at + 1] if single else ids)
        seconds = time.perf_counter() - started
        self._llama.n_tokens = depth  # the next eval drops what lies behind
        return seconds


def worker(engine: str, path: str, threads: int, context: int) -> None:
    """Answer requests on standard input, one JSON object a line, until it ends."""
    import random

    model: Engine = (Coli if engine == "coli" else LlamaCpp)(path, threads, context)
    rng = random.Random(1)
    ids = [rng.randrange(min(model.vocab_size, 32000)) for _ in range(context)]
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        model.seek(request["depth"], ids)
        start = rng.randrange(context - request["count"])
        seconds = model.run(ids[start : start + request["count"]], request["single"])
        print(json.dumps({"seconds": seconds}), flush=True)


class Worker:
    """A worker process."""

    def __init__(self, python: str, engine: str, path: Path, threads: int, context: int) -> None:
        command = [python, __file__, "--worker", engine, str(path), str(threads), str(context)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def seconds(self, depth: int, count: int, single: bool) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"depth": depth, "count": count, "single": single}) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries may print
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit(f"a worker ended with status {self._process.wait()}: {' '.join(self._process.args)}")


@dataclass(frozen=True, slots=True)
class Result:
    """One test: tok/s as medians of all rounds, ratio coli / llama.cpp as median of the rounds' ratios."""

    test: str
    threads: int
    depth: int
    coli: float
    llama_cpp: float
    ratio: float
    lowest_ratio: float
    highest_ratio: float
    rounds: int
    gigabytes_per_s: float | None  # weights that coli reads for the ids of a decode
    gmac_per_s: float


@dataclass(frozen=True, slots=True)
class Work:
    """What one id costs: bytes of weights read and multiply-adds, attention aside."""

    nbytes: int
    macs: int


def work_per_id(container: Path) -> Work:
    """From the manifest: every dense matrix but the embedding's lookup, and the experts one id chooses."""
    from coli.model.tensors import container_spec
    from coli.store.container import Container
    from coli.store.layout import MatrixShape

    opened = Container.open(container)
    spec = container_spec(opened)
    nbytes = macs = 0
    for name, shape in opened.manifest.tensors.items():
        if isinstance(shape, MatrixShape) and (name != "model.embed_tokens.weight" or spec.tie_word_embeddings):
            nbytes += shape.weights_bytes + shape.scales_bytes
            macs += shape.rows * shape.cols
    for layer_idx in spec.moe_layers:
        for part in opened.expert_layout(layer_idx).parts.values():
            nbytes += spec.num_experts_per_tok * (part.shape.weights_bytes + part.shape.scales_bytes)
            macs += spec.num_experts_per_tok * part.rows * part.cols
    return Work(nbytes, macs)


def measure(args: argparse.Namespace, container: Path) -> Iterator[Result]:
    """All tests, for every thread count with fresh workers."""
    work = work_per_id(container)
    tests = [(f"pp{args.prompt}", args.prompt, False), (f"tg{args.generate}", args.generate, True)]
    context = max(args.depth) + max(args.prompt, args.generate) + CHUNK
    for threads in args.threads:
        ours = Worker(sys.executable, "coli", container, threads, context)
        theirs = Worker(args.llama_python, "llama.cpp", args.model, threads, context)
        try:
            for depth in args.depth:
                for engine in (ours, theirs):  # warm up: caches, experts, context
                    engine.seconds(depth, args.prompt, False)
                    engine.seconds(depth, 4, True)
                for name, count, single in tests:
                    times = [
                        (ours.seconds(depth, count, single), theirs.seconds(depth, count, single))
                        for _ in range(args.rounds)
                    ]
                    ratios = [their / our for our, their in times]
                    speed = count / median(our for our, _ in times)
                    yield Result(
                        test=name,
                        threads=threads,
                        depth=depth,
                        coli=speed,
                        llama_cpp=count / median(their for _, their in times),
                        ratio=median(ratios),
                        lowest_ratio=min(ratios),
                        highest_ratio=max(ratios),
                        rounds=args.rounds,
                        gigabytes_per_s=speed * work.nbytes / 1e9 if single else None,
                        gmac_per_s=speed * work.macs / 1e9,
                    )
        finally:
            ours.close()
            theirs.close()


HEADER = """| test | threads | depth | coli tok/s | llama.cpp tok/s | ratio | of rounds | GB/s | GMAC/s |
|---|---|---|---|---|---|---|---|---|"""


def line(result: Result) -> str:
    read = "" if result.gigabytes_per_s is None else f"{result.gigabytes_per_s:.1f}"
    return (
        f"| {result.test} | {result.threads} | {result.depth} | {result.coli:.1f} | {result.llama_cpp:.1f}"
        f" | {result.ratio:.2f} | {result.lowest_ratio:.2f}..{result.highest_ratio:.2f} | {read}"
        f" | {result.gmac_per_s:.0f} |"
    )


def convert_once(model: Path, container: Path) -> None:
    if (container / "coli.json").exists():
        return
    from coli.convert import ConvertOptions, convert

    convert(model, container, ConvertOptions(), _note)


def _note(text: str) -> None:
    print(f"coli: {text}", file=sys.stderr)


def _numbers(text: str) -> list[int]:
    return [int(item) for item in text.split(",")]


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        engine, path, threads, context = sys.argv[2:6]
        worker(engine, path, int(threads), int(context))
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--llama-python", required=True, help="a Python that can import llama_cpp")
    parser.add_argument("--container", type=Path, help="where the converted model is, or is put")
    parser.add_argument("--threads", type=_numbers, default=[2])
    parser.add_argument("--depth", type=_numbers, default=[0])
    parser.add_argument("-p", "--prompt", type=int, default=512)
    parser.add_argument("-n", "--generate", type=int, default=64)
    parser.add_argument("-r", "--rounds", type=int, default=5)
    parser.add_argument("-o", "--output", choices=["md", "json"], default="md")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.model.parent) as folder:
        container = args.container or Path(folder) / "model"
        convert_once(args.model, container)
        if args.output == "md":
            print(HEADER, flush=True)
        results = []
        for result in measure(args, container):
            results.append(result)
            if args.output == "md":
                print(line(result), flush=True)
        if args.output == "json":
            print(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
