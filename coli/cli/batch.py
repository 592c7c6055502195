"""`coli batch`: a file of requests becomes a file of answers, restartable."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from coli.cli.conversing import context_length
from coli.cli.flags import GENERATE, settings_options
from coli.cli.json_output import check_target, write_json
from coli.cli.model_path import model_path
from coli.cli.report_lines import percent, size
from coli.cli.streams import Streams
from coli.errors import OptionError
from coli.options import draft_options, engine_options, generate_options, resolve

if TYPE_CHECKING:
    from coli.tools.batch import BatchReport

PARTIAL = 3  # exit status: some rows have errors
_UNUSED = ("prompt", "prompt_ids", "raw", "system", "tokens")  # of one answer: rows say these
SETTINGS = (*(name for name in GENERATE if name not in _UNUSED), "slots")


@click.command("batch")
@click.argument("source", metavar="IN", type=click.Path(path_type=Path))
@click.option("-o", "--output", "target", metavar="OUT", required=True, type=click.Path(path_type=Path),
              help="file the answers are appended to; - is standard output")  # fmt: skip
@settings_options(*SETTINGS)
def command(source: Path, target: Path, **flags: Any) -> None:
    """Answer the requests of IN, one JSON object a line as in OpenAI's batch files, into OUT.

    Rows run side by side and are recorded in the order in which they end. The same command goes on where it was
    stopped. Exit status 3: some rows have errors, which their records name.
    """
    settings = resolve(flags, names=SETTINGS)
    streams = Streams(settings["quiet"], settings["verbose"], settings["color"])
    for notice in settings.notices:
        streams.notice(notice)
    check_target(settings["json"])
    if str(target) == "-" and str(settings["json"]) == "-":
        raise OptionError("--json: standard output is taken by -o -; give a file")
    if (report_to := settings["json"]) is not None:
        for other, what in ((source, "the input"), (target, "the file of the answers")):
            if report_to.resolve() == other.resolve() or (
                report_to.exists() and other.exists() and report_to.samefile(other)
            ):
                raise OptionError(f"--json: {report_to}: is {what} too; choose another file")
    if importlib.util.find_spec("pydantic") is None:
        raise OptionError("batch: pydantic is not installed; type: pip install 'coli[batch]'")
    path = model_path(settings, streams.notice)
    streams.progress(f"loading {path}")
    from coli.llm import LLM
    from coli.tools.batch import BatchOptions, run_batch

    with LLM.open(path, engine_options(settings), streams.notice) as llm:
        streams.clear_progress()
        given = str(settings["model"]) if settings["model"] is not None else path.name
        names = tuple(dict.fromkeys((path.resolve().name, given)))
        asked = settings["ctx"] is not None
        context = context_length(llm, settings)
        options = BatchOptions(names, settings["slots"], context, asked, settings["kv"], settings["think"])
        with _Progress(streams) as progress:
            report = run_batch(
                llm, source, target, options, generate_options(settings), draft_options(settings), progress
            )
    for line in _lines(report, target):
        streams.report(line)
    if settings["json"] is not None:
        write_json(settings["json"], {**report.fields(), "settings": settings.report()})
    if report.errors:
        click.get_current_context().exit(PARTIAL)


def _lines(report: BatchReport, target: Path) -> list[str]:
    fields = report.fields()
    kept = f", {report.kept} of them before" if report.kept else ""
    lines = [f"{target}: {report.rows} rows{kept}, {report.errors} with errors"]
    if report.answered:
        lines.append(
            f"{report.answered} answers, {report.generated_tokens} tokens in {report.seconds:.1f} s: "
            f"{fields['tokens_per_s']:.1f} tok/s, {fields['tokens_per_forward']:.2f} tokens/forward, "
            f"{fields['answers_per_forward']:.1f} answers side by side"
        )
        if report.store.hit_rate() is not None:
            lines.append(
                f"experts: {percent(report.store.hit_rate())} hit rate, "
                f"{size(fields['bytes_per_token'])} read per token"
            )
    return lines


class _Progress:
    """Rows done, errors, speed and the time left, on a terminal."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._bar: Any = None
        self._task: Any = None

    def __call__(self, report: BatchReport) -> None:
        if self._bar is None:
            return
        if self._task is None:
            self._task = self._bar.add_task("batch", total=report.rows, completed=report.kept, speed="", errors=0)
        speed = f"{report.generated_tokens / report.seconds:.1f} tok/s" if report.seconds else ""
        self._bar.update(self._task, completed=report.done, speed=speed, errors=report.errors)

    def __enter__(self) -> _Progress:
        if self._streams.quiet or not sys.stderr.isatty():
            return self
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[errors]} errors"),
            TextColumn("{task.fields[speed]}"), TimeRemainingColumn(),
        )  # fmt: skip
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()
