"""`coli grammar check`: what a grammar forces, and what would be drafted from it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from coli.cli.flags import MODEL, OUTPUT, settings_options
from coli.cli.json_output import STDOUT, write_json
from coli.cli.model_path import model_path
from coli.cli.streams import Streams, one_line
from coli.options import resolve

TEXT_CAP = 2**20  # bytes of standard input that are looked at


@click.group("grammar", help="Explain grammars and JSON Schemas for --grammar and --schema.")
def command() -> None:
    """The group; its commands do the work."""


@command.command("check")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--text", metavar="TEXT", help="mark what is forced in TEXT (- reads standard input)")
@click.option("--schema", "is_schema", is_flag=True, help="FILE is a JSON Schema  [default: if it begins with {]")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object instead")
@settings_options("model", *OUTPUT)
def check(file: Path, text: str | None, is_schema: bool, as_json: bool, **flags: Any) -> None:
    """Read FILE (GBNF or JSON Schema) and explain it.

    With --text the characters that are forced are marked. With --model as well, the tokens that would be drafted are
    shown, with how many the text confirms.
    """
    from coli.grammar.load import GRAMMAR_TAG, SCHEMA_TAG
    from coli.text.tokenizer import Tokenizer
    from coli.tools.grammar_check import check_facts, check_grammar, check_lines

    settings = resolve(flags, names=(*MODEL, *OUTPUT))
    streams = Streams(settings["quiet"], settings["verbose"], settings["color"])
    for notice in settings.notices:
        streams.notice(notice)
    if text == "-":
        text = sys.stdin.buffer.read(TEXT_CAP).decode("utf-8", "surrogateescape")
    tokenizer = Tokenizer.load(model_path(settings, streams.notice)) if settings["model"] else None
    findings = check_grammar(file, tag=SCHEMA_TAG if is_schema else GRAMMAR_TAG, text=text, tokenizer=tokenizer)
    if as_json:
        write_json(STDOUT, check_facts(findings))
        return
    for line in check_lines(findings):
        streams.text(one_line(line) + "\n")
