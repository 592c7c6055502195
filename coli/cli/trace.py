"""`coli trace`: answer a prompt as `coli run` does and keep which experts it asked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from coli.cli.flags import GENERATE, settings_options
from coli.cli.report_lines import size
from coli.cli.run import respond
from coli.cli.streams import Streams
from coli.errors import OptionError
from coli.options import resolve

if TYPE_CHECKING:
    from coli.llm import LLM


@click.command("trace")
@click.argument("prompt", nargs=-1, type=str)
@click.option(
    "-o", "--output", required=True, metavar="TRACE", type=click.Path(path_type=Path), help="file to write; required"
)
@settings_options(*GENERATE)
def command(prompt: tuple[str, ...], output: Path, **flags: Any) -> None:
    """Answer PROMPT as `coli run` does, and write the routes to TRACE for `coli replay`.

    TRACE holds expert ids only, two bytes each: no text, no weights.
    """
    settings = resolve(flags, names=GENERATE)
    streams = Streams(settings["quiet"], settings["verbose"], settings["color"])
    for notice in settings.notices:
        streams.notice(notice)
    if output.is_dir():
        raise OptionError(f"--output: {output}: is a folder; expected a file")
    if output.exists() and not output.is_file():
        raise OptionError(f"--output: {output}: a pipe or a device cannot be replaced; expected a file")
    if not os.access(output.parent, os.W_OK):
        raise OptionError(f"--output: {output.parent}: no folder that can be written")
    from coli.tools.trace import TraceRecorder, traced_model, write_trace

    recorder = TraceRecorder()

    def check(llm: LLM) -> None:
        if not llm.container.moe_layers:
            raise OptionError(f"{llm.container.path}: a dense model has no routed experts to trace")
        if output.exists() and output.resolve().parent == llm.container.path.resolve():
            raise OptionError(f"--output: {output}: a file of the model; name another")

    def done(llm: LLM) -> None:
        store = llm.load(1).store
        assert store is not None
        trace = recorder.trace(
            traced_model(llm.container, llm.spec.num_stored_layers, llm.spec.num_experts_per_tok), store.policy
        )
        write_trace(output, trace)
        streams.report(f"{output}: {trace.tokens} decode rows, {size(output.stat().st_size)}")

    respond(prompt, settings, streams, recorder, check, done)
