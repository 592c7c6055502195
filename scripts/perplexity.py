"""Perplexity of converted models over a text, and how much each loses against the first.

    python scripts/perplexity.py MODEL [MODEL ...] --text FILE [--tokens 20480] [--window 1024] [-o md|json]

The text is cut into windows of ids that do not overlap; every id but a window's first is scored from those before it.
Models that share a tokenizer are compared id by id, which makes small losses visible: the ratio of perplexities comes
with its standard error. Keys and values are float32 unless --kv says otherwise, so that only weights differ.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coli.errors import ColiError
from coli.llm import LLM
from coli.options import EngineOptions

ROWS = 128  # whose logits are held at a time


@dataclass(frozen=True, slots=True)
class Score:
    """One model over one text. `losses` are negative log-likelihoods in nats, one for each scored id."""

    model: str
    quantization: str
    tokens: int
    perplexity: float
    error: float  # standard error of the perplexity
    ratio: float  # to the first model's perplexity
    ratio_error: float
    top1: float  # share of ids that were the model's first choice
    seconds: float


def losses(llm: LLM, ids: Sequence[int], window: int) -> tuple[NDArray[np.float64], int]:
    """(nats of every scored id, how many of them were the best one)."""
    prefix = list(llm.tokenizer.prefix_ids)
    body = window - len(prefix)
    loaded = llm.load(window)
    found: list[NDArray[np.float64]] = []
    best = 0
    for start in range(0, len(ids), body):
        piece = np.array([*prefix, *ids[start : start + body]], np.int64)
        cache = loaded.new_cache(window)
        first = len(prefix) or 1  # the first id has nothing before it, unless there is a BOS
        for at in range(0, len(piece), ROWS):
            rows = piece[at : at + ROWS]
            positions = np.arange(at, at + len(rows), dtype=np.int64)
            logits = loaded.model.forward(
                cache, rows, positions, None, np.arange(len(rows), dtype=np.int64), prefill=True
            )
            targets = piece[at + 1 : at + 1 + len(rows)]
            scores = logits[: len(targets)].astype(np.float64)
            top = scores.max(axis=1)
            log_sum = top + np.log(np.exp(scores - top[:, None]).sum(axis=1))
            chosen = scores[np.arange(len(targets)), targets]
            keep = slice(max(0, first - 1 - at), None)
            found.append((log_sum - chosen)[keep])
            best += int((chosen == top)[keep].sum())
        progress(min(start + body, len(ids)), len(ids))
    return np.concatenate(found), best


def score(
    path: Path, text: str, args: argparse.Namespace, baseline: NDArray[np.float64] | None
) -> tuple[Score, NDArray]:
    started = time.monotonic()
    options = EngineOptions(threads=args.threads, kv=args.kv, usage_save=False)
    with LLM.open(path, options, lambda line: print(f"coli: {line}", file=sys.stderr)) as llm:
        window = min(args.window, llm.spec.max_position_embeddings)
        ids = llm.tokenizer.encode(text)[: args.tokens]
        nats, best = losses(llm, ids, window)
        kinds = ", ".join(f"{key} {llm.container.manifest.quantization[key]}" for key in ("dense", "experts"))
        kinds = kinds if llm.spec.num_experts else kinds.split(",")[0]
    perplexity = float(np.exp(nats.mean()))
    difference = nats - baseline if baseline is not None and len(baseline) == len(nats) else np.full(1, np.nan)
    ratio = float(np.exp(difference.mean()))
    result = Score(
        model=path.name,
        quantization=kinds,
        tokens=len(nats),
        perplexity=perplexity,
        error=perplexity * _standard_error(nats),
        ratio=1.0 if baseline is None else ratio,
        ratio_error=0.0 if baseline is None else ratio * _standard_error(difference),
        top1=best / len(nats),
        seconds=time.monotonic() - started,
    )
    return result, nats


def _standard_error(values: NDArray[np.float64]) -> float:
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else float("nan")


def table(scores: Sequence[Score]) -> str:
    """A Markdown table."""
    lines = [
        "| model | weights | tokens | perplexity | against the first | best id right | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for item in scores:
        change = f"{100 * (item.ratio - 1):+.2f} % ± {100 * item.ratio_error:.2f}"
        lines.append(
            f"| {item.model} | {item.quantization} | {item.tokens} | {item.perplexity:.4f} ± {item.error:.4f}"
            f" | {change} | {100 * item.top1:.2f} % | {item.seconds:.0f} |"
        )
    return "\n".join(lines)


def progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done} of {total} tokens", end="" if done < total else "\n", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL", help="converted models; the first is the base")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=20480, help="of the text, at most")
    parser.add_argument("--window", type=int, default=1024, help="ids scored together")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--kv", choices=["auto", "f16", "f32"], default="f32")
    parser.add_argument("-o", "--output", choices=["md", "json"], default="md")
    args = parser.parse_args()
    text = args.text.read_text(encoding="utf-8")
    scores: list[Score] = []
    baseline: NDArray[np.float64] | None = None
    try:
        for path in args.models:
            result, nats = score(path, text, args, baseline)
            scores.append(result)
            baseline = nats if baseline is None else baseline
    except ColiError as error:
        print(f"perplexity: {error}", file=sys.stderr)
        return error.exit_code
    print(table(scores) if args.output == "md" else json.dumps([asdict(item) for item in scores], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
