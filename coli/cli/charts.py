"""--plot: charts to a file, or as bars of text behind the table that a command prints."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coli.cli.streams import write_output
from coli.cli.tables import render
from coli.errors import OptionError

if TYPE_CHECKING:
    from coli.tools.charts import Chart

FORMATS = (".svg", ".png", ".pdf")
TERMINAL = Path("-")
HELP = "draw it into this .svg, .png or .pdf (needs the extra `plot`); - draws bars in the terminal"
BAR = 50  # characters of the longest bar
_EIGHTHS = " ▏▎▍▌▋▊▉"


def check_picture(path: Path | None) -> None:
    """OptionError early for a picture that could not be drawn after minutes of work."""
    if path is None or path == TERMINAL:
        return
    if path.suffix.lower() not in FORMATS:
        raise OptionError(f"--plot: {path}: expected a name ending in {', '.join(FORMATS)}, or - for the terminal")
    if not path.parent.is_dir():
        raise OptionError(f"--plot: {path.parent}: no such folder")
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionError("--plot: matplotlib is not installed; type: pip install 'coli[plot]', or --plot -")


def show(charts: Sequence[Chart], path: Path) -> None:
    """Draw the charts where --plot says."""
    if path == TERMINAL:
        write_output("".join(as_lines(chart) for chart in charts).encode())
        return
    from coli.tools.charts import draw

    draw(charts, path)


def as_lines(chart: Chart) -> str:
    """The chart as a table of rich with a bar behind every number."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(chart.title), title_justify="left")
    table.add_column("")
    table.add_column(Text(chart.x), justify="right")
    table.add_column(Text(chart.y), justify="right")
    table.add_column("")
    most = max((y for points in chart.series.values() for _, y in points), default=0.0)
    for name, points in chart.series.items():
        for number, (x, y) in enumerate(points):
            value = f"{y:.1%}" if chart.percent else f"{y:.4g}"
            place = x if isinstance(x, str) else f"{x:g}"
            table.add_row(*map(Text, (name if number == 0 else "", place, value, bar(y / most if most else 0.0))))
        table.add_section()
    return render(table)


def bar(share: float) -> str:
    """A bar of `share` of the full length, in eighths of a character."""
    eighths = round(max(0.0, min(1.0, share)) * BAR * 8)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()
