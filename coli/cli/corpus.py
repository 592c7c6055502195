"""`coli corpus`: frozen token ids to draft from, as one mapped file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from coli.cli.flags import settings_options
from coli.cli.index_commands import StageProgress, index_group
from coli.cli.streams import Streams
from coli.errors import OptionError
from coli.options import resolve

command = index_group(
    "corpus",
    "Make and inspect corpora of token ids for --corpus: [TOKENS] logs, id files or text.",
    draft_special=True,
)


@command.command("download")
@click.argument("name", metavar="NAME")
@click.option("--max-docs", required=True, type=click.IntRange(1), metavar="N", help="articles to fetch")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="file to write  [default: NAME.jsonl]")
@click.option("--language", default="en", show_default=True, help="edition of Wikipedia")
@click.option("--snapshot", metavar="DATE", help="day the text was taken  [default: 20231101]")
@settings_options("quiet", "color", "debug")
def download(name: str, max_docs: int, output: Path | None, language: str, snapshot: str | None, **flags: Any) -> None:
    """Fetch text to build a graph or corpus of; NAME is wikipedia (needs the extra `corpus`).

    The articles become JSON lines with their licence beside them. What was interrupted goes on when the same command is
    given again. HF_ENDPOINT and HF_TOKEN count.
    """
    from coli.tools.corpus_download import NAMES, SNAPSHOT, DownloadOptions, download_wikipedia

    settings = resolve(flags, names=("hf_token", "quiet", "color", "debug"))
    streams = Streams(settings["quiet"], color=settings["color"])
    for notice in settings.notices:
        streams.notice(notice)
    if name not in NAMES:
        raise OptionError(f"corpus download: {name}: expected {' or '.join(NAMES)}")
    target = output or Path(f"{name}.jsonl")
    if target.is_dir():
        target = target / f"{name}.jsonl"
    options = DownloadOptions(max_docs, language, snapshot or SNAPSHOT, settings["hf_token"])
    download_wikipedia(target, options, streams.notice, StageProgress(streams))
    streams.clear_progress()
    streams.report(f"{target}; use it: coli graph build {target} -o graph.safetensors --model M")
