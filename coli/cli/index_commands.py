"""build, add and info, as `coli corpus` and `coli graph` have them: one kind of file, two usual contents."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from coli.cli.flags import MODEL, OUTPUT, settings_options
from coli.cli.json_output import STDOUT, write_json
from coli.cli.model_path import model_path
from coli.cli.report_lines import size
from coli.cli.streams import Streams, one_line
from coli.errors import OptionError
from coli.options import Resolved, resolve
from coli.text.tokenizer import Tokenizer
from coli.text.vocabulary import model_vocabulary

if TYPE_CHECKING:
    from coli.drafts.index_file import IndexHeader
    from coli.tools.corpus_build import BuildOptions

KINDS = click.Choice(["text", "jsonl", "ids", "log"])


def index_group(name: str, purpose: str, *, draft_special: bool) -> click.Group:
    """The group `coli NAME` with build, add and info. draft_special: whether special tokens in ids may be drafted."""
    group = click.Group(name, help=purpose)
    for make in (_build_command, _add_command):
        group.add_command(make(name, draft_special))
    group.add_command(_info_command(name))
    return group


def open_settings(flags: dict[str, Any]) -> tuple[Resolved, Streams]:
    """The model and output settings of a command, and its streams."""
    settings = resolve(flags, names=(*MODEL, "tokenizer_name", "max_order", "chunk_size", *OUTPUT))
    streams = Streams(settings["quiet"], settings["verbose"], settings["color"])
    for notice in settings.notices:
        streams.notice(notice)
    return settings, streams


def model_tokenizer(settings: Resolved, streams: Streams) -> tuple[Tokenizer, int]:
    """The tokenizer of the model that is meant, and how many ids the model has (some pad their vocabulary)."""
    named = None if settings["model"] else settings["tokenizer_name"]
    folder = model_path(settings, streams.notice, named)
    return model_vocabulary(folder)


def _input_options(function: Callable[..., None]) -> Callable[..., None]:
    chunk_help = "characters encoded at a time; the result is the same"
    for option in (
        settings_options("model", *OUTPUT),
        click.option("--chunk-size", type=click.IntRange(1), metavar="N", help=chunk_help),
        click.option("--field", default="text", show_default=True, help="field of a JSON line that holds the text"),
        click.option("--format", "kind", type=KINDS, help="how to read the inputs  [default: by name and content]"),
    ):
        function = option(function)
    return function


def _build_command(name: str, draft_special: bool) -> click.Command:
    @click.command("build")
    @click.argument("files", nargs=-1, required=True)
    @click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="file to write")
    @click.option("--max-order", type=int, metavar="N", help="longest context drafted from, 1..10  [default: 5]")
    @click.option("--span-files", is_flag=True, help="let n-grams run from one document into the next")
    @click.option("--prune", default=0, metavar="N", help="leave out pairs of ids seen fewer than N times")
    @_input_options
    def build(
        files: tuple[str, ...],
        output: Path,
        max_order: int | None,
        span_files: bool,
        prune: int,
        kind: str | None,
        field: str,
        chunk_size: int | None,
        **flags: Any,
    ) -> None:
        from coli.tools.corpus_build import BuildOptions, build_index

        options = BuildOptions(kind, field, 5, span_files, prune, chunk_size)
        _run(build_index, files, output, options, draft_special, flags, max_order)

    build.help = (
        f"Index FILES as a {name} for a model's tokenizer.\n\n"
        "FILES are files, folders (their .txt, .md and .jsonl files), globs, or - for standard input: plain text, "
        "JSON lines, token ids, or logs with [TOKENS] lines. An interrupted build goes on where it was."
    )
    return build


def _add_command(name: str, draft_special: bool) -> click.Command:
    @click.command("add")
    @click.argument("index", metavar="INDEX", type=click.Path(path_type=Path))
    @click.argument("files", nargs=-1, required=True)
    @_input_options
    def add(
        index: Path, files: tuple[str, ...], kind: str | None, field: str, chunk_size: int | None, **flags: Any
    ) -> None:
        """Add FILES to INDEX, as if it had been built of everything."""
        from coli.tools.corpus_build import BuildOptions, add_to_index

        _run(add_to_index, files, index, BuildOptions(kind, field, piece_chars=chunk_size), draft_special, flags)

    return add


def _run(
    work: Callable[..., IndexHeader],
    files: Sequence[str],
    output: Path,
    options: BuildOptions,
    draft_special: bool,
    flags: dict[str, Any],
    max_order: int | None = None,
) -> None:
    settings, streams = open_settings(flags)
    options = dataclasses.replace(
        options,
        max_order=settings["max_order"] if max_order is None else max_order,
        piece_chars=options.piece_chars or settings["chunk_size"],
    )
    tokenizer, vocab_size = model_tokenizer(settings, streams)
    if not draft_special:
        options = dataclasses.replace(options, banned=frozenset(tokenizer.special_ids))
    began = time.perf_counter()
    encoder = _CountedEncoder(tokenizer)
    header = work(files, output, encoder, vocab_size, options, StageProgress(streams))
    streams.clear_progress()
    if settings["verbose"]:
        size_of_pieces = options.piece_chars or "as many characters as are fastest"
        streams.report(f"text encoded in {encoder.pieces} calls of the tokenizer, cut at {size_of_pieces}")
    streams.report(
        f"{output}: {header.num_ids} ids in {header.num_documents} documents, orders 1..{header.max_order}, "
        f"{size(output.stat().st_size)}, {time.perf_counter() - began:.1f} s"
    )


class _CountedEncoder:
    """The tokenizer, and how often it was asked to encode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.vocab_size, self.fingerprint, self.token_bytes = (
            tokenizer.vocab_size,
            tokenizer.fingerprint,
            tokenizer.token_bytes,
        )
        self.pieces = 0

    def encode(self, text: str, special: bool = False) -> list[int]:
        self.pieces += 1
        return self._tokenizer.encode(text, special)


class StageProgress:
    """Stage, done and in all -> a line on a terminal, once per percent."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._shown = ("", -1)

    def __call__(self, what: str, done: int, total: int) -> None:
        shown = what, 100 * done // max(total, 1)
        if shown != self._shown:
            self._shown = shown
            self._streams.progress(f"{what}: {shown[1]}%")


def _info_command(name: str) -> click.Command:
    @click.command("info")
    @click.argument("index", metavar="INDEX", type=click.Path(path_type=Path))
    @click.option(
        "--why", "why_text", metavar="TEXT", help="what is drafted behind TEXT, and from where (needs --model)"
    )
    @click.option("--check", is_flag=True, help="read the whole file, compare its digest and count again")
    @click.option("--json", "as_json", is_flag=True, help="print one JSON object instead")
    @settings_options("model", *OUTPUT)
    def info(index: Path, why_text: str | None, check: bool, as_json: bool, **flags: Any) -> None:
        """Show what INDEX holds."""
        from coli.drafts.ngram_index import NgramIndex
        from coli.tools.index_facts import check_content, index_facts

        settings, streams = open_settings(flags)
        if why_text == "":
            raise OptionError("--why: give the text whose continuation is asked about")
        opened = NgramIndex(index)
        if check:
            check_content(opened, recount=True)
        facts = index_facts(opened)
        if check:
            facts["digest_checked"] = True
        if why_text is not None:
            facts["why"] = _reasons(index, why_text, settings, streams)
        if as_json:
            write_json(STDOUT, facts)
            return
        for line in _info_lines(facts):
            streams.text(one_line(line) + "\n")

    return info


def _reasons(path: Path, text: str, settings: Resolved, streams: Streams) -> dict[str, Any]:
    """The longest known suffix of `text` and what follows it: text, count, source and byte offset of its last place."""
    from coli.drafts.ngram_index import NgramIndex
    from coli.tools.index_facts import check_content, why

    tokenizer, vocab_size = model_tokenizer(settings, streams)
    index = NgramIndex.open(path, vocab_size=vocab_size, tokenizer=tokenizer.fingerprint)
    check_content(index)  # its numbers are followed to places in the file
    ids = tokenizer.encode(text)
    order, occurrences, reasons = why(index, ids, tokenizer)
    return {
        "context": tokenizer.decode(ids[-order:]) if order else "",
        "order": order,
        "occurrences": occurrences,
        "successors": [
            {
                "token_id": reason.token_id,
                "text": tokenizer.decode([reason.token_id]),
                "count": reason.count,
                "source": reason.source,
                "offset": reason.offset,
                "exact": reason.exact,
            }
            for reason in reasons
        ],
    }


def _info_lines(facts: dict[str, Any]) -> list[str]:
    lines = [
        f"{facts['path']}: {facts['num_ids']} ids in {facts['num_documents']} documents of {facts['sources']} inputs",
        f"orders 1..{facts['max_order']}, documents {'joined' if facts['span_files'] else 'apart'}"
        + (f", pairs seen {facts['prune']} times or more" if facts["prune"] else ""),
        *(f"order {order}: {count} contexts" for order, count in facts["contexts"].items()),
        f"{facts['heavy_contexts']} frequent contexts summed up",
        f"{size(facts['bytes'])}, {facts['bytes_per_id']:.2f} bytes per id",
        f"vocabulary of {facts['vocab_size']} ids, tokenizer {facts['tokenizer'][:16]}",
        f"digest {facts['digest'][:16]}" + (", content as written" if facts.get("digest_checked") else ""),
    ]
    if "why" in facts:
        found = facts["why"]
        lines.append(
            f"behind {found['context']!r} (order {found['order']}), seen {found['occurrences']} times:"
            if found["order"]
            else "no suffix of this text is known"
        )
        lines += [
            f"  {entry['text']!r} {entry['count']}x, last in {entry['source']} "
            f"{'at' if entry['exact'] else 'in the line or run of ids at'} byte {entry['offset']}"
            for entry in found["successors"]
        ]
    return lines
