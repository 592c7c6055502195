"""`coli convert`: a model folder becomes a coli container."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from coli.cli.flags import settings_options
from coli.cli.report_lines import size
from coli.cli.streams import Streams
from coli.options import kernel_cache, resolve
from coli.text.chat import ChatTemplate
from coli.text.tokenizer import Tokenizer

QUANTIZATIONS = click.Choice(["f32", "q8", "q4"])
SETTINGS = ("threads", "simd", "kernel_cache", "quiet", "color", "debug")


@click.command("convert")
@click.argument("source", metavar="SRC", type=click.Path(path_type=Path))
@click.argument("target", metavar="DST", type=click.Path(path_type=Path))
@click.option("--quant", type=QUANTIZATIONS, help="type of all matrices  [default: experts q4, dense q8]")
@click.option("--experts", type=QUANTIZATIONS, help="type of the experts' matrices  [default: --quant, else q4]")
@click.option("--dense", type=QUANTIZATIONS, help="type of all other matrices  [default: --quant, else q8]")
@click.option(
    "--calibrate",
    metavar="TEXT",
    type=click.Path(path_type=Path),
    help="file of plain text; what matters on it weighs the error of q4 scales  [default: all columns alike]",
)
@settings_options(*SETTINGS)
def command(
    source: Path,
    target: Path,
    quant: str | None,
    experts: str | None,
    dense: str | None,
    calibrate: Path | None,
    **flags: Any,
) -> None:
    """Convert SRC, a Hugging Face model folder or a GGUF file, into the container folder DST.

    Without options, Q4_0 and Q8_0 weights of a GGUF file stay as they are.
    An interrupted conversion goes on where it stopped when the same command is given again. SRC is never changed.
    """
    settings = resolve(flags, names=SETTINGS)
    streams = Streams(settings["quiet"], color=settings["color"])
    for notice in settings.notices:
        streams.notice(notice)
    from coli.convert import ConvertOptions, convert  # numba and the kernels: not needed for --help

    options = ConvertOptions(quant, experts, dense, settings["threads"], settings["simd"], kernel_cache(settings))
    _check_text(source, streams)
    if calibrate is None:
        report = convert(source, target, options, streams.notice, _Progress(streams))
    else:
        from coli.tools.calibrate import convert_calibrated

        report = convert_calibrated(source, target, options, calibrate, streams.notice, _Progress(streams))
    streams.clear_progress()
    resumed = f", {report.resumed_files} kept from before" if report.resumed_files else ""
    streams.report(
        f"{report.path}: {size(report.container_bytes)} in {report.files} files{resumed}, from "
        f"{size(report.source_bytes)} in {report.seconds:.1f} s, peak memory {size(report.peak_memory_bytes)}"
    )


def _check_text(source: Path, streams: Streams) -> None:
    """A tokenizer that could not be opened later is refused now; one that is missing is only worth a line."""
    if not (source / "config.json").exists():
        return  # convert says what is wrong with such a folder
    if not (source / "tokenizer.json").exists():
        streams.notice(f"{source}: no tokenizer.json: the container cannot be run before one is put into it")
        return
    Tokenizer.load(source)
    ChatTemplate.load(source)


class _Progress:
    """Source bytes done and in all -> a line on a terminal, once per percent."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._percent = -1

    def __call__(self, done: int, total: int) -> None:
        percent = 100 * done // max(total, 1)
        if percent != self._percent:
            self._percent = percent
            self._streams.progress(f"converting: {percent}% of {size(total)}")
