"""The table of docs/quality.md: one model's perplexity at every quantization, all from the same float32 weights.

    python scripts/quality_table.py SRC --text FILE --calibrate FILE --work FOLDER [--tokens 20480] [--only NAME ...]

SRC is a Hugging Face folder. Each way of quantizing becomes a container in FOLDER and is scored over the same ids;
containers and scores stay there, so that a second call computes only what is new. Texts are unwrapped: lines of one
paragraph are joined, runs of spaces become one, and paragraphs with box drawings are left out.

    f32, q8, q4      coli convert --quant
    q4-max7          q4 with the scale max|w| / 7 of every group, no search
    q4_0             the gguf package's Q4_0, held as q4 bit for bit
    q4-calibrated    coli convert --quant q4 --calibrate
"""

import argparse
import gzip
import hashlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import perplexity
from numpy.typing import NDArray

from coli.convert import ConvertOptions, convert
from coli.errors import ColiError
from coli.kernels import quantize
from coli.llm import LLM
from coli.options import EngineOptions

Weights = NDArray[np.float32]
Quantized = tuple[NDArray[np.uint8], NDArray[np.float16]]

BASE = "f32"
NAMES = (BASE, "q8", "q4", "q4-max7", "q4_0", "q4-calibrated")
BOXES = re.compile("[\u2500-\u257f]")


@dataclass(frozen=True, slots=True)
class Scored:
    """Losses in nats of every scored id, and how many ids were the model's first choice."""

    nats: NDArray[np.float64]
    best: int
    seconds: float


def plain_text(path: Path) -> str:
    """The text of a file (may be gzipped), one paragraph a line."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return "\n\n".join(part for part in paragraphs if part and not BOXES.search(part))


def max7(w: Weights) -> Quantized:
    """w (R, C) -> nibbles (R, C), scales (R, C / 32): the scale puts the largest weight of a group on 7."""
    groups = w.reshape(len(w), -1, 32)
    scales = (np.abs(groups).max(axis=2) / 7).astype(np.float16)
    steps = scales.astype(np.float32)[:, :, None]
    values = np.divide(groups, steps, out=np.zeros_like(groups), where=steps != 0)
    return (np.clip(np.rint(values), -8, 7) + 8).astype(np.uint8).reshape(w.shape), scales


def q4_0(w: Weights) -> Quantized:
    """The same by the gguf package: blocks of a float16 scale and 16 bytes, low nibbles first."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize as by_gguf

    blocks = by_gguf(w, GGMLQuantizationType.Q4_0).reshape(len(w), -1, 18)
    packed = blocks[:, :, 2:]
    nibbles = np.concatenate([packed & 15, packed >> 4], axis=2).reshape(w.shape)
    return nibbles, np.ascontiguousarray(blocks[:, :, :2]).view(np.float16)[:, :, 0]


@contextmanager
def quantized_by(rule: Callable[[Weights], Quantized] | None) -> Iterator[None]:
    """Inside, conversion takes its q4 integers and scales from `rule`."""
    ours = quantize.quantize_q4

    def other(w: Weights, importance: object, report: object, threads: int) -> Quantized:
        assert rule is not None
        return rule(np.pad(np.asarray(w, np.float32), ((0, 0), (0, -w.shape[1] % 32))))

    try:
        if rule is not None:
            quantize.quantize_q4 = other
        yield
    finally:
        quantize.quantize_q4 = ours


def container(name: str, args: argparse.Namespace) -> Path:
    """The container of one row of the table, made on first use."""
    path: Path = args.work / name
    if (path / "coli.json").exists():
        return path
    kind = name if name in ("f32", "q8") else "q4"
    rule = {"q4-max7": max7, "q4_0": q4_0}.get(name)
    options = ConvertOptions(quant=kind)
    with quantized_by(rule):
        if name == "q4-calibrated":
            from coli.tools.calibrate import convert_calibrated

            text = args.work / "calibration.txt"
            text.write_text(plain_text(args.calibrate), encoding="utf-8")
            convert_calibrated(args.source, path, options, text, note)
        else:
            convert(args.source, path, options, note)
    return path


def scored(name: str, args: argparse.Namespace, text: str) -> Scored:
    """One row's losses, from the work folder if they were computed before."""
    path = container(name, args)
    with LLM.open(path, EngineOptions(threads=args.threads, kv="f32", usage_save=False), note) as llm:
        job = json.dumps(
            [llm.container.fingerprint, hashlib.sha256(text.encode()).hexdigest(), args.tokens, args.window]
        )
        kept = args.work / f"{name}-{hashlib.sha256(job.encode()).hexdigest()[:16]}.npz"
        if kept.exists():
            with np.load(kept) as file:
                return Scored(file["nats"], int(file["best"]), float(file["seconds"]))
        began = time.monotonic()
        nats, best = perplexity.losses(llm, llm.tokenizer.encode(text)[: args.tokens], args.window)
    found = Scored(nats, best, time.monotonic() - began)
    np.savez(kept, nats=nats, best=best, seconds=found.seconds)
    return found


def row(name: str, found: Scored, base: Scored) -> str:
    """A line of the Markdown table; losses are compared id by id, so the error of the ratio is small."""
    value = float(np.exp(found.nats.mean()))
    difference = found.nats - base.nats
    ratio = float(np.exp(difference.mean()))
    error = ratio * float(difference.std(ddof=1)) / len(difference) ** 0.5
    change = "" if name == BASE else f"{100 * (ratio - 1):+.2f} % ± {100 * error:.2f}"
    return f"| {name} | {value:.3f} | {change} | {100 * found.best / len(found.nats):.2f} % |"


def note(line: str) -> None:
    print(f"coli: {line}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path, metavar="SRC")
    parser.add_argument("--text", type=Path, required=True, help="judged")
    parser.add_argument("--calibrate", type=Path, required=True, help="another text, for the importance of columns")
    parser.add_argument("--work", type=Path, required=True, help="folder for containers and scores")
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    text = plain_text(args.text)
    try:
        base = scored(BASE, args, text)
        print(f"{len(base.nats)} ids scored; the text's sha256 is {hashlib.sha256(text.encode()).hexdigest()}\n")
        print("| weights | perplexity | against f32 | best id right |\n|---|---|---|---|", flush=True)
        for name in args.only:
            print(row(name, scored(name, args, text), base), flush=True)
    except ColiError as error:
        print(f"quality_table: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
