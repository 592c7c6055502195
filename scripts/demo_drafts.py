"""What each draft source saves on the demo model's NDJSON, with the wall clock beside it: unseen texts, one command.

    python scripts/demo_drafts.py [--samples 21] [--seed 2026] [--threads N]

Every sample is several records of one kind. The ways of decoding take turns on each sample, so that a busy machine
slows all of them alike, and every answer must equal plain decoding's. `grammar` has the kind's keys, quotes and small
sets of values, no answer; `others' answers` is a corpus of the same kind from other texts; `this answer` is the replay.
Sources keep what they learn from sample to sample, as in a server or a batch; the first of each kind stands apart.
`--gate always` drafts every proposal in full, the default gate (`seed`) only what its rules allow.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from random import Random

import demo_data

from coli.builtin import DEMO_MODEL
from coli.llm import LLM
from coli.options import DraftOptions, EngineOptions, GenerateOptions

TOKENS = 400  # longer than any answer
SEEN = 200  # records from which a kind's grammar is made
ENUM = 8  # distinct values of a field that count as a set
OTHERS = 8  # answers in the corpus of a kind
TAIL = r"""number ::= "0" | "-"? [1-9] [0-9]* ("." [0-9]+)? | "0." [0-9]+
string ::= "\"" [^"\\]* "\""
"""


def grammar(task: str) -> str:
    """GBNF of lines of records of one kind, as somebody who knows the format would write it."""
    rng = Random(f"grammar {task}")
    records = [demo_data.RECORDS[task](rng)[1] for _ in range(SEEN)]
    fields = []
    for number, key in enumerate(records[0]):
        values = [record[key] for record in records]
        texts = sorted({value for value in values if isinstance(value, str)})
        if len(texts) in range(1, ENUM + 1) and len(texts) == len(set(values)):
            value = "(" + " | ".join(f'"\\"{text}\\""' for text in texts) + ")"
        elif all(isinstance(value, int | float | Decimal) and not isinstance(value, bool) for value in values):
            value = "number"
        else:
            value = "string"
        fields.append(f'"{"," if number else ""}\\"{key}\\":" {value}')
    return 'root ::= record ("\\n" record)*\nrecord ::= "{" ' + " ".join(fields) + ' "}"\n' + TAIL


def samples(count: int, seed: int | str) -> list[tuple[str, demo_data.Sample]]:
    """(kind, several records) of kinds in turn."""
    rng = Random(f"drafts {seed}")
    found: list[tuple[str, demo_data.Sample]] = []
    kinds = list(demo_data.RECORDS)
    while len(found) < count:
        sample = demo_data.ndjson(rng)
        kind = next(kind for kind in kinds if f"{kind}s" in sample.prompt.splitlines()[0])
        if kind == kinds[len(found) % len(kinds)]:
            found.append((kind, sample))
    return found


def write_ids(llm: LLM, path: Path, answers: Sequence[str]) -> Path:
    """A corpus: the ids of each answer, as the model writes it, on a line of its own."""
    path.write_text("".join(" ".join(map(str, llm.tokenizer.encode(answer))) + "\n" for answer in answers))
    return path


class Way:
    """One way of decoding: sums over all samples, and over the first of each kind."""

    def __init__(self) -> None:
        self.tokens, self.forwards, self.seconds = [0, 0], [0, 0], [0.0, 0.0]

    def add(self, tokens: int, forwards: int, seconds: float, first: bool) -> None:
        for at in (0, 1) if first else (0,):
            self.tokens[at] += tokens
            self.forwards[at] += forwards
            self.seconds[at] += seconds


def measure(options: argparse.Namespace) -> dict[str, Way]:
    ways: dict[str, Way] = defaultdict(Way)
    seen: set[str] = set()
    engine = EngineOptions(threads=options.threads, pin="off", usage_save=False, gate_save=False)
    with tempfile.TemporaryDirectory() as name, LLM.open(DEMO_MODEL, engine, lambda line: None) as llm:
        folder = Path(name)
        others: dict[str, list[str]] = defaultdict(list)
        for kind, sample in samples(OTHERS * len(demo_data.RECORDS), f"others {options.seed}"):
            others[kind].append(sample.answer)
        grammars, corpora = {}, {}
        for kind in demo_data.RECORDS:
            grammars[kind] = folder / f"{kind}.gbnf"
            grammars[kind].write_text(grammar(kind))
            corpora[kind] = write_ids(llm, folder / f"{kind}.txt", others[kind])
        for number, (kind, sample) in enumerate(samples(options.samples, options.seed)):
            ids, wanted = llm.prompt_ids(sample.prompt), GenerateOptions(max_tokens=TOKENS)
            plain = llm.generate(ids, wanted, DraftOptions(enabled=False)).result
            replay = folder / f"replay-{number}.txt"
            replay.write_text(" ".join(map(str, plain.token_ids)) + "\n")
            rules, known = grammars[kind], corpora[kind]
            drafts = {
                "plain": DraftOptions(enabled=False),
                "grammar": DraftOptions(grammar=rules),
                "grammar, --gate always": DraftOptions(grammar=rules, gate="always"),
                "n-grams": DraftOptions(draft=8),
                "corpus: others' answers": DraftOptions(corpus=known, corpus_minacc=0),
                "corpus: this answer": DraftOptions(corpus=replay, corpus_minacc=0),
                "grammar, n-grams": DraftOptions(grammar=rules, draft=8),
                "grammar, n-grams, others' answers": DraftOptions(
                    grammar=rules, draft=8, corpus=known, corpus_minacc=0
                ),
                "grammar, n-grams, this answer": DraftOptions(grammar=rules, draft=8, corpus=replay, corpus_minacc=0),
                "grammar, n-grams, others' answers, --gate always": DraftOptions(
                    grammar=rules, draft=8, corpus=known, corpus_minacc=0, gate="always"
                ),
            }
            for way, draft in drafts.items():
                result = llm.generate(ids, wanted, draft).result
                assert result.token_ids == plain.token_ids, f"{way}: another answer than plain decoding's"
                report = result.report
                seconds = report["generated_tokens"] / report["decode_tps"]
                ways[way].add(report["generated_tokens"], report["forwards"], seconds, kind not in seen)
            seen.add(kind)
    return ways


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    ways = measure(options)
    print(f"{options.samples} texts, {ways['plain'].tokens[0]} tokens; the same answers every way\n")
    print("| drafts | tokens/forward | of the first of a kind | tok/s | seconds of decoding |\n|---|---|---|---|---|")
    for name, way in ways.items():
        each, first = (tokens / forwards for tokens, forwards in zip(way.tokens, way.forwards, strict=True))
        print(f"| {name} | {each:.2f} | {first:.2f} | {way.tokens[0] / way.seconds[0]:,.0f} | {way.seconds[0]:.2f} |")


if __name__ == "__main__":
    main()
