"""Pictures of measurements: SVG, PNG or PDF by matplotlib (the extra `plot`).

A chart is data with words around it; coli.cli.charts shows the same in a terminal. Called by the command line.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coli.errors import WriteError

MARKS = "osD^vP*X"


@dataclass(frozen=True, slots=True)
class Chart:
    """`series`: name -> points. x are numbers, drawn as lines, or labels, drawn as bars. percent: y is a share."""

    title: str
    x: str
    y: str
    series: Mapping[str, Sequence[tuple[float | str, float]]]
    percent: bool = False
    log_x: bool = False

    @property
    def bars(self) -> bool:
        return any(isinstance(x, str) for points in self.series.values() for x, _ in points)


def draw(charts: Sequence[Chart], path: Path) -> None:
    """The charts below one another in one file, which appears whole or not at all. Raises WriteError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4 * len(charts)), layout="constrained")
    FigureCanvasAgg(figure)
    for number, chart in enumerate(charts, 1):
        _draw(figure.add_subplot(len(charts), 1, number), chart)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    kind = path.suffix.lower().removeprefix(".")
    try:
        with part.open("wb") as file:
            figure.savefig(file, format=kind, metadata={"Date": None} if kind == "svg" else None)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise WriteError(f"{path}: cannot be written: {error.strerror or error}") from None


def _draw(axes: Any, chart: Chart) -> None:
    if chart.bars:
        labels = list(dict.fromkeys(str(x) for points in chart.series.values() for x, _ in points))
        width = 0.8 / len(chart.series)
        for number, (name, points) in enumerate(chart.series.items()):
            places = [labels.index(str(x)) + (number - (len(chart.series) - 1) / 2) * width for x, _ in points]
            axes.bar(places, [y for _, y in points], width, label=name)
        axes.set_xticks(range(len(labels)), labels)
    else:
        for number, (name, points) in enumerate(chart.series.items()):
            mark = MARKS[number % len(MARKS)]  # to be told apart without colour
            axes.plot([x for x, _ in points], [y for _, y in points], marker=mark, markersize=4, label=name)
        if chart.log_x:
            axes.set_xscale("log", base=2)
            ticks = sorted({x for points in chart.series.values() for x, _ in points})
            axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    if chart.percent:
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set(title=chart.title, xlabel=chart.x, ylabel=chart.y)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if len(chart.series) > 1 or not chart.bars:
        axes.legend(fontsize="small")
