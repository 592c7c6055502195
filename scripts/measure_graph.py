"""What a graph of much text costs: python scripts/measure_graph.py --model M FOLDER... -o g.safetensors

Takes .py, .md, .rst and .txt files of the folders, in order, up to --bytes of them. Prints a Markdown table: seconds of
encoding and of everything beyond it, size, peak memory, opening, and microseconds per drafted id with 5 orders mixed,
over random places and behind the most common words. A file that is there is measured and not built again.
"""

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from coli.drafts.index_file import DEPTH
from coli.drafts.ngram_index import Mixing, NgramIndex
from coli.text.tokenizer import Tokenizer
from coli.text.vocabulary import model_vocabulary
from coli.tools.corpus_inputs import TEXT, Input
from coli.tools.corpus_shards import remove_work_folder, tokenize
from coli.tools.index_writer import IndexOptions, write_index

SUFFIXES = {".py", ".md", ".rst", ".txt"}
PLACES, IDS_PER_DRAFT, COMMON = 2000, 8, 50
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
    tokens = tokenize(inputs, target, tokenizer, vocab_size=vocab_size, banned=frozenset(tokenizer.special_ids))
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
    opening = [_seconds(lambda: NgramIndex(path)) for _ in range(9)]
    index, mixing = NgramIndex(path), Mixing()
    tokens = index.array("tokens")
    rng = np.random.default_rng(1)
    places = [int(at) for at in rng.integers(DEPTH, len(tokens) - 1, PLACES) if (tokens[at - 5 : at] >= 0).all()]
    contexts = [tokens[at - DEPTH : at].tolist() for at in places]
    counts = np.diff(index.array("first"))
    common = [[int(token_id)] for token_id in np.argsort(-counts)[:COMMON]]
    rows = [
        ("size", f"{path.stat().st_size / index.num_ids:.2f} bytes per id"),
        ("open", f"{1e3 * statistics.median(opening):.1f} ms warm, {1e3 * opening[0]:.1f} ms the first time"),
    ]
    for name, all_contexts in (("random places", contexts), ("the most common words", common)):
        for context in all_contexts:
            index.draft(context, IDS_PER_DRAFT, mixing)  # warm
        began, drafted = time.perf_counter(), 0
        for context in all_contexts:
            drafted += len(index.draft(context, IDS_PER_DRAFT, mixing)[0])
        rows.append((f"drafted id, 5 orders mixed, {name}", f"{1e6 * (time.perf_counter() - began) / drafted:.1f} us"))
    return rows


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--model", required=True, type=Path, help="folder with the tokenizer")
    parser.add_argument("--bytes", type=int, default=100_000_000)
    parser.add_argument("-o", "--output", required=True, type=Path)
    args = parser.parse_args()
    rows = (
        []
        if args.output.exists()
        else build(text_files(args.folders, args.bytes), args.output, *model_vocabulary(args.model))
    )
    for name, value in [("", ""), ("---", "---"), *rows, *uses(args.output)]:
        print(f"| {name} | {value} |" if name != "---" else "|---|---|")
    return 0


if __name__ == "__main__":
    sys.exit(main())
