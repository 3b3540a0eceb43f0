"""Print tables on stdout, and draw the pictures that belong to them.

Tables are those of rich, without markup: names of classes and files may hold brackets. A number is never cut off or
folded; a name is folded where the terminal is narrow.
"""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from rich import box
from rich.cells import cell_len
from rich.table import Table

from semisfl.cli import console

T = TypeVar("T")
"""The type of a value that a cell shows."""

UNKNOWN = "–"
"""Stands in a table for a value that is not known."""
FEW_LETTERS = 16
"""Letters in a line of a text column; longer texts are folded where the terminal is narrow."""
SUFFIXES = (".png", ".svg", ".pdf", ".jpg", ".jpeg")
"""The endings of a picture's name that choose its format; any other name gets .png added."""


def table(title: str, columns: Sequence[str], *, text: int = 1) -> Table:
    """Return an empty table, to be filled with `add_row` and printed with `show`.

    Args:
        title: a line above the table; empty: none.
        columns: the names of the columns.
        text: the first so many columns hold text, the others numbers.
    """
    made = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),  # names may be long
        pad_edge=False,
        min_width=len(title),
    )
    for place, column in enumerate(columns):
        if place < text:
            made.add_column(column, overflow="fold")
        else:
            made.add_column(column, justify="right", no_wrap=True)
    return made


def show(table: Table) -> None:
    """Print a table on stdout; wider than the terminal if its numbers and `FEW_LETTERS` of each text need that."""
    needed = 0
    for column in table.columns:
        lines = "\n".join(map(str, (column.header, *column.cells))).split("\n")
        longest = max(map(cell_len, lines))
        column.min_width = longest if column.no_wrap else min(longest, FEW_LETTERS)
        needed += column.min_width + 2
    if needed > console.out.width:
        table.width = needed
    console.out.print(table, crop=False)


def known(value: T | None, show: Callable[[T], str] = str) -> str:
    """Return the cell of a value; `UNKNOWN` for None.

    Args:
        value: what the cell shows.
        show: turns the value into text, with its unit.
    """
    return UNKNOWN if value is None else show(value)


def picture_beside(runs: Sequence[Path], name: str) -> Path:
    """Return the usual place of a picture: in the run's folder, or in the working directory if there are several runs.

    Args:
        runs: the run directories on the command line.
        name: the picture's name.
    """
    return (runs[0] if len(runs) == 1 and runs[0].is_dir() else Path()) / name


def draw(place: Path, save: Callable[[Path], None]) -> Path | None:
    """Draw a picture and return its file; None, after a warning, if it cannot be drawn: the numbers are worth more.

    Args:
        place: the file to write; .png is added unless the name ends in one of `SUFFIXES`.
        save: writes the picture to a file. It is not called where matplotlib, an extra, is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        hint = "no picture, as matplotlib is not installed; pip install 'semisfl[plots]'"
        console.say(hint, "warning")
        return None
    picture = place if place.suffix in SUFFIXES else place.with_name(f"{place.name}.png")
    try:
        save(picture)
    except OSError as error:
        console.say(f"no picture: {picture}: {error.strerror or error}; choose --out", "warning")
        return None
    return picture
