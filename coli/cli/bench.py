"""`coli bench`: llama-bench's flags and field names, with what coli adds about reading, memory and ceilings."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from coli.cli import charts
from coli.cli.flags import OUTPUT, settings_options
from coli.cli.model_path import model_path
from coli.cli.report_lines import percent, size
from coli.cli.streams import Streams, one_line, write_output
from coli.errors import OptionError
from coli.options import EngineOptions, Resolved, kernel_cache, resolve
from coli.settings_table import BY_NAME

if TYPE_CHECKING:
    from coli.tools.bench import Test
    from coli.tools.charts import Chart

ENGINE = ("model", "home", "threads", "ram", "io", "kv", "prefetch", "cap", "simd", "kernel_cache")
MAX_ROWS = 64  # of a forward that checks drafts
MOST = 1 << 20  # ids of a test, repetitions
FORMATS = ("md", "csv", "json", "jsonl")
COLUMNS = ("model", "size", "params", "backend", "threads", "test", "t/s", "cache", "hit rate", "read per token",
           "peak memory", "of read speed", "of integer rate", "python", "forecast")  # fmt: skip


@click.command("bench")
@click.option("-m", "--model", "models", multiple=True, metavar="TEXT", help="model to measure (repeatable)"
              "  [COLI_MODEL; default: the built-in one]")  # fmt: skip
@click.option("-p", "--n-prompt", default="512", metavar="N,...", help="ids of a prompt; 0 is none  [default: 512]")
@click.option("-n", "--n-gen", default="128", metavar="N,...", help="ids to decode; 0 is none  [default: 128]")
@click.option("-d", "--n-depth", default="0", metavar="N,...", help="ids before those  [default: 0]")
@click.option("--rows", "n_rows", default="0", metavar="N,...", help="rows of a forward, as drafts are checked; "
              "0 is none  [default: 0]")  # fmt: skip
@click.option("-r", "--repetitions", default="5", metavar="N", help="of every test  [default: 5]")
@click.option("-t", "--threads", "threads", metavar="N,...", help="compute threads  [COLI_THREADS; default: physical "
              "cores this process may use]")  # fmt: skip
@click.option("--cache", default="warm", metavar="warm,cold", help="cold opens the model anew for every repetition, "
              "its files dropped from the page cache  [default: warm]")  # fmt: skip
@click.option("--no-warmup", is_flag=True, help="measure the first repetition as it comes")
@click.option("--no-probe", is_flag=True, help="do not measure memory and processor first")
@click.option("-o", "--output", type=click.Choice(FORMATS), default="md", help="what to print  [default: md]")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help=charts.HELP)
@click.option("--json", "as_json", is_flag=True, help="the same as -o json")
@settings_options("ram", "io", "kv", *OUTPUT)
def command(
    models: tuple[str, ...],
    n_prompt: str,
    n_gen: str,
    n_depth: str,
    n_rows: str,
    repetitions: str,
    threads: str | None,
    cache: str,
    no_warmup: bool,
    no_probe: bool,
    output: str,
    plot: Path | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Measure how fast models read prompts (pp), decode (tg) and check drafts (vr), several values separated by commas.

    Beside llama-bench's columns: cache state, hit rate, bytes read per token, peak memory, the share of this machine's
    memory and integer speed, and the share of the time spent outside kernels. No usage history is read or written.
    """
    settings = resolve(flags, names=(*ENGINE, *OUTPUT))
    streams = Streams(settings["quiet"], settings["verbose"], settings["color"])
    for notice in settings.notices:
        streams.notice(notice)
    from coli.tools.bench import BenchOptions, bench, check, measure_ceilings
    from coli.tools.bench_forecast import BenchForecast

    options = BenchOptions(
        tests=_tests(n_prompt, n_gen, n_depth, n_rows),
        threads=_threads(threads, settings),
        repetitions=_numbers("-r", repetitions, least=1, only=True)[0],
        warmup=not no_warmup,
        cache_states=_states(cache),
    )
    paths = [model_path(settings, streams.notice, name) for name in models or (None,)]
    engine = EngineOptions(
        memory_budget_bytes=settings["ram"], io=settings["io"], kv=settings["kv"], prefetch=settings["prefetch"],
        cap=settings["cap"], simd=settings["simd"], kernel_cache=kernel_cache(settings), pin="off",
        usage_save=False, gate_save=False,
    )  # fmt: skip
    charts.check_picture(plot)
    if plot == charts.TERMINAL and (as_json or output != "md"):
        raise OptionError("--plot: bars go behind the table only; leave out -o, or give a file")
    show = PRINTERS["json" if as_json else output](lambda text: write_output(text.encode()))
    for path in paths:
        check(path, options)
    results: list[Mapping[str, Any]] = []
    ceilings = {} if no_probe else measure_ceilings(options.num_threads, engine, streams.progress)
    for path in paths:
        expected = BenchForecast(path, ceilings)
        for result in bench(path, engine, options, streams.notice, streams.progress, ceilings, expected):
            streams.clear_progress()
            show.result(result)
            results.append(result)
    show.end()
    if plot is not None:
        charts.show(_charts(results), plot)


def _tests(n_prompt: str, n_gen: str, n_depth: str, n_rows: str) -> tuple[Test, ...]:
    from coli.tools.bench import Test

    prompts, gens, depths = _numbers("-p", n_prompt), _numbers("-n", n_gen), _numbers("-d", n_depth)
    kinds = [(count, 0, 0) for count in prompts] + [(0, count, 0) for count in gens]
    kinds += [(0, 0, count) for count in _numbers("--rows", n_rows, most=MAX_ROWS)]
    kinds = [kind for kind in kinds if any(kind)]
    if not kinds:
        raise OptionError("-p, -n and --rows: all are 0, so there is nothing to measure; give one of them")
    return tuple(Test(prompt, gen, depth, rows) for depth in depths for prompt, gen, rows in kinds)


def _numbers(flag: str, text: str, *, least: int = 0, most: int = MOST, only: bool = False) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    good = all(word.isdecimal() and word.isascii() and least <= int(word) <= most for word in words)
    if not good or (only and len(words) > 1):
        wanted = "a whole number" if only else "whole numbers, separated by commas,"
        raise OptionError(f"{flag}: expected {wanted} from {least} to {most}, found {text!r}")
    return tuple(dict.fromkeys(int(word) for word in words))


def _threads(text: str | None, settings: Resolved) -> tuple[int | None, ...]:
    if text is None:
        return (settings["threads"],)
    return tuple(dict.fromkeys(BY_NAME["threads"].parse(word.strip(), "--threads") for word in text.split(",")))


def _states(text: str) -> tuple[str, ...]:
    from coli.tools.bench import COLD, WARM

    words = [word.strip() for word in text.split(",")]
    if not set(words) <= {WARM, COLD}:
        raise OptionError(f"--cache: expected {WARM}, {COLD} or both, separated by a comma, found {text!r}")
    return tuple(dict.fromkeys(words))


def _charts(results: list[Mapping[str, Any]]) -> list[Chart]:
    """Speeds by test, and what forwards cost by their rows, in forwards of one row where that was measured."""
    from coli.tools.charts import Chart

    differing = [
        name for name in ("model_filename", "n_threads", "cache") if len({result[name] for result in results}) > 1
    ]
    speeds: dict[str, list[tuple[float | str, float]]] = {}
    costs: dict[str, list[tuple[float | str, float]]] = {}
    for result in results:
        words = [Path(str(result[name])).name + (" threads" if name == "n_threads" else "") for name in differing]
        name = ", ".join(words) or Path(result["model_filename"]).name
        if rows := result["n_rows"]:
            depth = f" @ d{result['n_depth']}" if len({r["n_depth"] for r in results}) > 1 else ""
            costs.setdefault(name + depth, []).append((rows, 1000 * rows / result["avg_ts"]))
        else:
            speeds.setdefault(name, []).append((cells(result)[5], result["avg_ts"]))
    found = [Chart("speed", "test", "tokens/s", speeds)] if speeds else []
    if costs:
        found.append(Chart("cost of rows", "rows of a forward", "ms", costs, log_x=True))
        by_one = {
            name: [(x, y / dict(points)[1]) for x, y in points] for name, points in costs.items() if 1 in dict(points)
        }
        if by_one:
            found.append(
                Chart("cost of rows, in forwards of one row", "rows of a forward", "forwards", by_one, log_x=True)
            )
    return found


class _Markdown:
    """llama-bench's table, a row as soon as it is measured."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write, self._begun = write, False

    def result(self, result: Mapping[str, Any]) -> None:
        if not self._begun:
            self._begun = True
            self._line(COLUMNS)
            self._line(["---", *["---:"] * (len(COLUMNS) - 1)])
        self._line(cells(result))

    def end(self) -> None:
        """Nothing follows a table."""

    def _line(self, words: Iterable[str]) -> None:
        self._write("| " + " | ".join(words) + " |\n")


def cells(result: Mapping[str, Any]) -> list[str]:
    """One row of the table."""
    count = result["n_prompt"] or result["n_gen"] or result["n_rows"]
    kind = "pp" if result["n_prompt"] else "tg" if result["n_gen"] else "vr"
    depth = f" @ d{result['n_depth']}" if result["n_depth"] else ""
    return [
        one_line(f"{Path(result['model_filename']).name} {result['model_type']}").replace("|", "\\|"),
        size(result["model_size"]),
        f"{result['model_n_params'] / 1e9:.2f} B" if result["model_n_params"] >= 1e9
        else f"{result['model_n_params'] / 1e6:.2f} M",
        result["backends"],
        str(result["n_threads"]),
        f"{kind}{count}{depth}",
        f"{result['avg_ts']:.2f} ± {result['stddev_ts']:.2f}",
        result["cache"],
        percent(result["expert_hit_rate"]),
        size(result["bytes_per_token"]),
        size(result["peak_memory_bytes"]),
        percent(result["bandwidth_share"]),
        percent(result["integer_share"]),
        percent(result["time_shares"]["python"]),
        _band(result["forecast_ts"]),
    ]  # fmt: skip


def _band(ends: tuple[float, float] | None) -> str:
    if ends is None:
        return "-"
    slow, fast = (f"{end:.2f}" for end in ends)
    return slow if slow == fast else f"{slow} .. {fast}"


class _Csv:
    """A header and one line a result; lists and objects as JSON."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write, self._begun = write, False

    def result(self, result: Mapping[str, Any]) -> None:
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n", quoting=csv.QUOTE_ALL)
        if not self._begun:
            self._begun = True
            writer.writerow(result)
        writer.writerow(
            json.dumps(v) if isinstance(v, list | tuple | dict) else "" if v is None else v for v in result.values()
        )
        self._write(buffer.getvalue())

    def end(self) -> None:
        """Nothing follows the last line."""


class _JsonLines:
    """One object a line, as soon as it is measured."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def result(self, result: Mapping[str, Any]) -> None:
        self._write(json.dumps(result) + "\n")

    def end(self) -> None:
        """Nothing follows the last line."""


class _Json:
    """One array when all is measured."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._results: list[Mapping[str, Any]] = []

    def result(self, result: Mapping[str, Any]) -> None:
        self._results.append(result)

    def end(self) -> None:
        self._write(json.dumps(self._results, indent=1) + "\n")


PRINTERS: Mapping[str, Callable[[Callable[[str], None]], _Markdown | _Csv | _Json | _JsonLines]] = {
    "md": _Markdown, "csv": _Csv, "json": _Json, "jsonl": _JsonLines,
}  # fmt: skip
