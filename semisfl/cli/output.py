"""Print tables, and draw the pictures that belong to them."""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from rich import box
from rich.cells import cell_len
from rich.table import Table

from semisfl.cli import console

T = TypeVar("T")

UNKNOWN = "–"
"""Stands in a table for a value that is not known."""
FEW_LETTERS = 16
"""Letters in a line of a text column; longer texts are folded where the terminal is narrow."""
SUFFIXES = (".png", ".svg", ".pdf", ".jpg", ".jpeg")


def table(title: str, columns: Sequence[str], *, text: int = 1) -> Table:
    """Return an empty table. The first ``text`` columns hold text, the others numbers."""
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
    """Return the cell of a value; `UNKNOWN` for None."""
    return UNKNOWN if value is None else show(value)


def picture_beside(runs: Sequence[Path], name: str) -> Path:
    """Return the usual place of a picture: in the run's folder, or here if there are several runs."""
    return (runs[0] if len(runs) == 1 and runs[0].is_dir() else Path()) / name


def draw(place: Path, save: Callable[[Path], None]) -> Path | None:
    """Draw a picture and return its file: ``place``, with .png added unless its name has a picture's suffix.

    ``save`` writes the picture to a file. Return None, after a warning, if that fails or matplotlib, an extra, is not
    installed: the numbers are worth more.
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
