"""Tables as plain text, the same whether a terminal or a file reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 160


def as_text(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, numbers to the right."""
    return render(as_table(columns, rows))


def as_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table of rich, for `render` or a picture."""
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for at, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if at else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def render(table: Table) -> str:
    """Lines without colour, ended by a newline."""
    from rich.console import Console

    console = Console(width=WIDTH, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()
