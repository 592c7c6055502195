"""`coli demo`: the built-in model in a few seconds, plain, drafting, and with too little memory for its experts."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from coli.builtin import DEMO_MODEL, GRAMMARS
from coli.cli.flags import OUTPUT, settings_options
from coli.cli.json_output import STDOUT, check_target, write_json
from coli.cli.report_lines import percent, size
from coli.cli.streams import Streams, write_output
from coli.cli.tables import as_table, render
from coli.errors import ColiError
from coli.options import DraftOptions, EngineOptions, GenerateOptions, kernel_cache, resolve

if TYPE_CHECKING:
    from rich.table import Table

    from coli.llm import LLM, GenerationResult

SETTINGS = ("threads", "simd", "kernel_cache", "io", "json", *OUTPUT)
ORDERS = """Turn these orders into NDJSON:
order 4102 by Anna Keller over 49.90 is paid, high priority.
#731 Omar Haddad 120.00 shipped normal priority - gift wrap
we have an order of 15.25 from Lucy Brown, number 1043, low priority, open. Note: leave at the door."""
TOKENS = 200  # at most; three orders need fewer
ROUNDS = 3  # each way; the one of middle speed is shown
COLUMNS = ("", "tok/s", "tokens/forward", "expert hit rate", "read per token")


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One way of decoding the same answer; speeds in tokens/s, rates of 1, bytes per generated token."""

    way: str
    decode_tps: float
    tokens_per_forward: float
    forwards: int
    expert_hit_rate: float
    bytes_per_token: int


@click.command("demo")
@settings_options(*SETTINGS)
def command(**flags: Any) -> None:
    """Turn three orders into JSON with the built-in model, in several ways, and compare them.

    Plain; with a grammar, a corpus and n-grams proposing tokens; and with room for only a third of the experts. The
    answer is the same every time.
    """
    settings = resolve(flags, names=SETTINGS)
    streams = Streams(settings["quiet"], settings["verbose"], settings["color"])
    for notice in settings.notices:
        streams.notice(notice)
    check_target(settings["json"])
    options = EngineOptions(
        threads=settings["threads"], io=settings["io"], simd=settings["simd"], kernel_cache=kernel_cache(settings),
        pin="off", usage_save=False,
    )  # fmt: skip
    answer, rows = compare(options, streams)
    if settings["json"] is not None:
        write_json(settings["json"], {"prompt": ORDERS, "text": answer, "rows": [dataclasses.asdict(r) for r in rows]})
    if settings["json"] != STDOUT:
        write_output(f"{ORDERS}\n\n{answer}\n\n".encode())
        write_output(render(table(rows)).encode())


def compare(options: EngineOptions, streams: Streams) -> tuple[str, list[Row]]:
    """The answer, and how fast each way came to it. Raises ColiError should one come to another answer."""
    from coli.llm import LLM  # numba and the kernels take a second: only now

    def notice(message: str) -> None:
        if "corpus drafts:" not in message:
            streams.notice(message)

    with tempfile.TemporaryDirectory(prefix="coli-demo-") as folder:
        corpus = Path(folder) / "corpus.txt"
        grammar = GRAMMARS / "ndjson-order.gbnf"
        plain = ("plain", DraftOptions(enabled=False))
        with LLM.open(DEMO_MODEL, options, notice) as llm:
            first = _answer(llm, DraftOptions(enabled=False))
            corpus.write_text(" ".join(map(str, first.token_ids)) + "\n")
            together = DraftOptions(grammar=grammar, corpus=corpus, corpus_minacc=0, draft=8, gate="seed")
            ways = [
                plain,
                ("grammar", DraftOptions(grammar=grammar, gate="seed")),
                ("n-grams", DraftOptions(draft=8, gate="seed")),
                ("corpus (this answer, replayed)", DraftOptions(corpus=corpus, corpus_minacc=0, gate="seed")),
                ("all three", together),
            ]
            rows = [_row(llm, way, drafts, first, streams) for way, drafts in ways]
            slots = llm.spec.num_experts // 3
        with LLM.open(DEMO_MODEL, dataclasses.replace(options, cap=slots), notice) as llm:
            third = f"{slots} of {llm.spec.num_experts} experts: "
            for way, drafts in (plain, ("all three", together)):
                rows.append(_row(llm, third + way, drafts, first, streams))
    return first.text.rstrip("\n"), rows


def table(rows: Sequence[Row]) -> Table:
    """The comparison as a table of rich."""
    return as_table(
        COLUMNS,
        [
            (
                row.way,
                f"{row.decode_tps:.0f}",
                f"{row.tokens_per_forward:.2f}",
                percent(row.expert_hit_rate),
                size(row.bytes_per_token),
            )
            for row in rows
        ],
    )


def _answer(llm: LLM, drafts: DraftOptions) -> GenerationResult:
    return llm.generate(llm.prompt_ids(ORDERS), GenerateOptions(max_tokens=TOKENS), drafts).result


def _row(llm: LLM, way: str, drafts: DraftOptions, first: GenerationResult, streams: Streams) -> Row:
    streams.progress(f"demo: {way}")
    results = [_answer(llm, drafts) for _ in range(ROUNDS)]
    streams.clear_progress()
    if any(result.token_ids != first.token_ids for result in results):
        raise ColiError(f"demo: {way}: another answer than plain decoding's; this is a bug, please report it")
    middle = sorted(results, key=lambda result: float(result.report["decode_tps"]))[ROUNDS // 2].report
    return Row(
        way,
        middle["decode_tps"],
        middle["tokens_per_forward"],
        middle["forwards"],
        middle["expert_hit_rate"],
        middle["bytes_per_token"],
    )
