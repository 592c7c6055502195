"""What a graph of much text costs, and what graphs of three kinds of text save.

    python scripts/measure_graph.py --model M FOLDER... -o g.safetensors
    python scripts/measure_graph.py --answers --model CONTAINER FOLDER...

Takes .py, .md, .rst and .txt files of the folders, in order, up to --bytes of them (100 MB, or 2 MB for answers). The
first form prints a Markdown table: seconds of encoding and of everything beyond it, size, peak memory, opening, the
longest suffix at random places (warm: this thread's processor time; cold: the page cache without the file), and
microseconds per drafted id with 5 orders mixed, over random places and behind the most common words. A file that is
there is measured and not built again.

The second answers openings of a contract plainly, with the measured gate and without a gate, in turn, until --minutes
are over: with a graph of the contract, of the model's own earlier answers, and of the folders' text, which has nothing
to do with it. Time is that of decoding beside the plain answers of the same round, the median of all rounds. An answer
that differs from the plain one makes the exit code 1.
"""

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coli.drafts.index_file import DEPTH
from coli.drafts.ngram_index import Mixing, NgramIndex
from coli.kernels.match import DRAFT, SEARCH
from coli.llm import LLM
from coli.options import DraftOptions, EngineOptions, GenerateOptions, GraphKnobs
from coli.text.tokenizer import Tokenizer
from coli.text.vocabulary import model_vocabulary
from coli.tools.corpus_build import BuildOptions, build_index
from coli.tools.corpus_inputs import IDS, TEXT, Input
from coli.tools.corpus_shards import Reading, remove_work_folder, tokenize
from coli.tools.index_writer import IndexOptions, write_index

SUFFIXES = {".py", ".md", ".rst", ".txt"}
PLACES, IDS_PER_DRAFT, COMMON, COLD = 2000, 8, 50, 40
CONTRACT = Path(__file__).parent / "legal_contract.md"
OPENINGS = (
    "Neither party is in breach of this Agreement if it is prevented from",
    "This Agreement begins on the date of the last signature and",
    "The Supplier shall provide the services with",
    "Each party shall keep the confidential information",
)
NEAR, OWN, UNRELATED = "text near the prompt", "its own earlier answers", "unrelated text"
GATES = {"auto": "auto", "off": "seed"}  # `seed` drafts whenever the graph knows a continuation
COLUMNS = (
    "graph",
    "gate",
    "accepted/compared at each position",
    "tokens/forward",
    "plain ms/token",
    "time beside plain",
    "processor time beside plain",
    "rounds",
)
Row = tuple[str, str]


def text_files(folders: Sequence[Path], most: int) -> list[Input]:
    """UTF-8 files without zero bytes, up to `most` bytes together."""
    found, total = [], 0
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix not in SUFFIXES or not path.is_file() or total >= most:
                continue
            data = path.read_bytes()
            try:
                data.decode()
            except UnicodeDecodeError:
                continue
            if data and b"\0" not in data:
                found.append(Input(str(path), TEXT, len(data), 0))
                total += len(data)
    return found


def build(inputs: list[Input], target: Path, tokenizer: Tokenizer, vocab_size: int) -> list[Row]:
    """Encode and index, timed apart."""
    began, used = time.perf_counter(), time.process_time()
    tokens = tokenize(inputs, target, Reading(tokenizer, vocab_size, banned=frozenset(tokenizer.special_ids)))
    encoded, encoded_used = time.perf_counter(), time.process_time()
    header = write_index(target, tokens, IndexOptions(vocab_size, tokenizer.fingerprint))
    remove_work_folder(target)
    ended, ended_used = time.perf_counter(), time.process_time()
    size = sum(source.size for source in inputs)
    return [
        ("text", f"{size / 1e6:.0f} MB in {len(inputs)} files, {header.num_ids / 1e6:.1f} million ids"),
        ("encoding", f"{encoded - began:.0f} s ({encoded_used - used:.0f} s CPU)"),
        ("build beyond encoding", f"{ended - encoded:.0f} s ({ended_used - encoded_used:.0f} s CPU)"),
        ("peak memory of the build", f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB"),
    ]


def uses(path: Path) -> list[Row]:
    """Size, opening and drafting of the index at `path`."""
    _ = SEARCH.address, DRAFT.address  # loaded once in a process, whoever opens an index
    opening = [_seconds(lambda: NgramIndex(path)) for _ in range(9)]
    contexts, common = _contexts(path)
    cold = [_cold_seconds(path, context) for context in contexts[:COLD]]  # while nobody has it mapped
    index, mixing = NgramIndex(path), Mixing()
    rows = [
        ("size", f"{path.stat().st_size / index.num_ids:.2f} bytes per id"),
        ("open", f"{1e3 * statistics.median(opening):.1f} ms warm, {1e3 * opening[0]:.1f} ms the first time"),
        ("longest suffix, cold", f"{1e3 * statistics.median(cold):.1f} ms (median of {len(cold)})"),
    ]
    for context in contexts:
        index.continuation(context, IDS_PER_DRAFT)  # warm
    passes = []
    for _ in range(5):
        began = time.thread_time()
        for context in contexts:
            index.continuation(context, IDS_PER_DRAFT)
        passes.append(1e6 * (time.thread_time() - began) / len(contexts))
    rows.append(("longest suffix, warm", f"{min(passes):.1f} us (least of {len(passes)} passes)"))
    for name, all_contexts in (("random places", contexts), ("the most common words", common)):
        for context in all_contexts:
            index.draft(context, IDS_PER_DRAFT, mixing)  # warm
        began, drafted = time.perf_counter(), 0
        for context in all_contexts:
            drafted += len(index.draft(context, IDS_PER_DRAFT, mixing)[0])
        rows.append((f"drafted id, 5 orders mixed, {name}", f"{1e6 * (time.perf_counter() - began) / drafted:.1f} us"))
    return rows


def _contexts(path: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Random places, and the most common ids."""
    index = NgramIndex(path)
    tokens = index.ids()
    rng = np.random.default_rng(1)
    places = [int(at) for at in rng.integers(DEPTH, len(tokens) - 1, PLACES) if (tokens[at - 5 : at] >= 0).all()]
    counts = np.diff(index.array("first"))
    common = [[int(token_id)] for token_id in np.argsort(-counts)[:COMMON]]
    return [tokens[at - DEPTH : at].tolist() for at in places], common


def _cold_seconds(path: Path, context: list[int]) -> float:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    index = NgramIndex(path)
    return _seconds(lambda: index.continuation(context, IDS_PER_DRAFT))


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: seconds of decoding, of processor time with the prompt's, its ids and the graph's counters."""

    decode_s: float
    cpu_s: float
    ids: tuple[int, ...]
    forwards: int
    counts: dict[str, Any]


def answers(model: Path, kind: str, folders: Sequence[Path], args: argparse.Namespace) -> bool:
    """Print the rows of one graph; whether all answers were the plain ones."""
    with tempfile.TemporaryDirectory() as work:
        kept = {"usage_save": False, "gate_save": False, "gate_file": Path(work) / "gate.json"}
        with LLM.open(model, EngineOptions(**kept, threads=args.threads), lambda notice: None) as llm:
            options = GenerateOptions(args.tokens, ignore_eos=True)
            plain = DraftOptions(enabled=False)
            prompts = [llm.prompt_ids(text, raw=True) for text in OPENINGS]
            llm.load(max(map(len, prompts)) + args.tokens)
            own = [answer(llm, ids, options, plain) for ids in prompts]
            graph = graph_of(kind, llm, own, folders, args, Path(work))
            ways = {"plain": plain} | {
                name: DraftOptions(graph=graph, draft=0, gate=gate, knobs=GraphKnobs(k=args.k))
                for name, gate in GATES.items()
            }
            for way in ways.values():
                answer(llm, prompts[0], options, way)
            rounds: list[dict[str, list[Answer]]] = []
            ends = time.monotonic() + 60 * args.minutes / 3
            while len(rounds) < 2 or time.monotonic() < ends:
                found: dict[str, list[Answer]] = {name: [] for name in ways}
                for at, ids in enumerate(prompts):
                    turn = (len(rounds) + at) % len(ways)
                    names = list(ways)
                    for name in [*names[turn:], *names[:turn]]:
                        found[name].append(answer(llm, ids, options, ways[name]))
                rounds.append(found)
    for name in GATES:
        print(f"| {kind} | {name} | " + " | ".join(cells(rounds, name)) + " |", flush=True)
    expected = [a.ids for a in rounds[0]["plain"]]
    same = all([a.ids for a in found] == expected for one in rounds for found in one.values())
    if not same:
        print(f"{kind}: an answer with drafts differs from the plain one", file=sys.stderr)
    return same


def graph_of(
    kind: str, llm: LLM, plain: Sequence[Answer], folders: Sequence[Path], args: argparse.Namespace, work: Path
) -> Path:
    """The graph of one kind of text."""
    names, form = [str(CONTRACT)], TEXT
    if kind == OWN:
        (work / "own.ids").write_text(" -1 ".join(" ".join(map(str, found.ids)) for found in plain))
        names, form = [str(work / "own.ids")], IDS
    elif kind == UNRELATED:
        names = [source.path for source in text_files(folders, args.bytes or 2_000_000)]
    options = BuildOptions(kind=form, banned=frozenset(llm.tokenizer.special_ids))
    header = build_index(names, work / "g", llm.tokenizer, llm.spec.vocab_size, options)
    print(f"{kind}: {header.num_ids} ids", file=sys.stderr)
    return work / "g"


def answer(llm: LLM, prompt: Sequence[int], options: GenerateOptions, drafts: DraftOptions) -> Answer:
    """Generate once."""
    before = time.process_time()
    result = llm.generate(prompt, options, drafts).result
    report = result.report
    seconds = (report["generated_tokens"] - 1) / report["decode_tps"]
    counts = report["drafts"].get("graph", {})
    return Answer(seconds, time.process_time() - before, result.token_ids, report["forwards"], counts)


def cells(rounds: Sequence[dict[str, list[Answer]]], name: str) -> list[str]:
    """Acceptance by position, tokens per forward, plain milliseconds a token, time and processor time beside plain."""
    mine = [found for one in rounds for found in one[name]]
    places = zip(*(zip(a.counts["accepted_at"], a.counts["judged_at"], strict=True) for a in mine), strict=True)
    acceptance = ", ".join(f"{sum(a for a, _ in place)}/{sum(j for _, j in place)}" for place in places)
    tokens = sum(len(a.ids) - 1 for a in mine)

    def beside(seconds: Callable[[Answer], float]) -> str:
        ratios = sorted(sum(map(seconds, one[name])) / sum(map(seconds, one["plain"])) for one in rounds)
        return f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"

    plain = [1000 * a.decode_s / (len(a.ids) - 1) for one in rounds for a in one["plain"]]
    return [
        acceptance,
        f"{tokens / sum(a.forwards for a in mine):.2f}",
        f"{statistics.median(plain):.2f}",
        beside(lambda a: a.decode_s),
        beside(lambda a: a.cpu_s),
        str(len(rounds)),
    ]


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--model", required=True, type=Path, help="folder with the tokenizer, or a container")
    parser.add_argument("--bytes", type=int)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--answers", action="store_true", help="the second form")
    parser.add_argument("--minutes", type=float, default=5.0, help="for all three graphs")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--k", type=int, default=5, help="ids per draft")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", action="append", choices=(NEAR, OWN, UNRELATED))
    args = parser.parse_args()
    if args.answers:
        print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
        kinds = args.only or (NEAR, OWN, UNRELATED)
        same = [answers(args.model, kind, args.folders, args) for kind in kinds]
        return 0 if all(same) else 1
    if args.output is None:
        parser.error("-o: name the graph to build or to measure")
    rows = (
        []
        if args.output.exists()
        else build(text_files(args.folders, args.bytes or 100_000_000), args.output, *model_vocabulary(args.model))
    )
    for name, value in [("", ""), ("---", "---"), *rows, *uses(args.output)]:
        print(f"| {name} | {value} |" if name != "---" else "|---|---|")
    return 0


if __name__ == "__main__":
    sys.exit(main())
