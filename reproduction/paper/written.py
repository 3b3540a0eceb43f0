"""Write a table or figure as Markdown: our number, the paper's, their difference, and the runs used."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from reproduction.paper.grid import Cell, Exhibit, Part, Value, set_title
from reproduction.paper.index import CellRuns, RunIndex
from reproduction.paper.measures import MEASURES, Measure, rounded
from reproduction.tables.numbers import table as markdown
from semisfl.data.partition import split
from semisfl.runs.report import Spread
from semisfl.settings.catalog import DATA
from semisfl.settings.lookup import note_of, title_of

NOT_RUN = "not run"
FEWER = (
    "A run with fewer rounds is another experiment, because its learning rate decays over those rounds. "
    "Its difference from the paper is not a difference between methods."
)


@dataclass(frozen=True)
class Measured:
    """A cell with its runs and the numbers measured in them."""

    result: CellRuns
    values: tuple[float, ...]
    """One number per run that has it."""
    why_not: str = ""
    """The reason why the first run without the number has none."""

    @property
    def spread(self) -> Spread | None:
        """Return mean and standard error, or None without a number."""
        return Spread.of(self.values) if self.values else None


Parts = Sequence[tuple[Part, Sequence[Measured]]]


def measured(exhibit: Exhibit, index: RunIndex, rounds: int | None = None) -> Parts:
    """Return the parts with the numbers of their cells' runs; no cells for a part without training."""
    return [
        (
            part,
            []
            if part.shown == "holders"
            else [_read(part, cell, index, rounds) for cell in part.cells],
        )
        for part in exhibit.parts
    ]


def _read(part: Part, cell: Cell, index: RunIndex, rounds: int | None) -> Measured:
    result = index.result(cell, rounds)
    read = [MEASURES[part.measure].of(indexed.run, cell) for indexed in result.runs]
    numbers = tuple(value for value in read if not isinstance(value, str))
    reasons = [value for value in read if isinstance(value, str)]
    return Measured(result, numbers, reasons[0] if reasons else "")


def text_of(
    exhibit: Exhibit, parts: Parts, picture: str | None = None, *, alone: bool = True
) -> str:
    """Return the whole text without a heading.

    Unless it stands ``alone``, notes that hold for many tables are left to the page around it.
    """
    lines: list[str] = []
    if exhibit.parts[0].shown == "holders":
        lines += [holders_table(exhibit), ""]
    for part, cells in parts:
        if cells:
            lines += [table(part, cells), ""]
    lines += _behind(parts)
    everything = [cell for _, cells in parts for cell in cells]
    notes = [
        *exhibit.notes,
        *data_notes(everything),
        *(_general_notes(everything) if alone else ()),
    ]
    lines += [f"- {note}" for note in notes]
    if picture is not None:
        lines += [*([""] if notes else []), f"![{exhibit.label or exhibit.title}]({picture})"]
    return "\n".join(lines).strip() + "\n"


def table(part: Part, cells: Sequence[Measured]) -> str:
    """Return the table, arranged as in the paper; a cell has our number, the paper's and the difference."""
    measure = MEASURES[part.measure]
    # If the numbers of rounds differ, every cell names its own.
    mixed = len({cell.result.rounds for cell in cells} - {None}) > 1
    columns = list(dict.fromkeys(cell.result.cell.column for cell in cells))
    rows = list(dict.fromkeys(cell.result.cell.row for cell in cells))
    places = {(cell.result.cell.row, cell.result.cell.column): cell for cell in cells}
    legend = "here"
    if any(cell.result.cell.paper for cell in cells):
        legend += " / paper / difference"
    lines = []
    for row in rows:
        there = [places.get((row, column)) for column in columns]
        method = next(cell.result.cell.method for cell in there if cell)
        mark = "\\*" if note_of(method) else ""
        texts = [cell_text(cell, measure, mixed) if cell else "" for cell in there]
        lines.append([row + mark, *texts])
    return f"**{part.title}**: {legend}\n\n{markdown([part.rows, *columns], lines)}"


def cell_text(one: Measured, measure: Measure, name_rounds: bool) -> str:
    """Return the text of one cell."""
    paper = one.result.cell.paper
    parts = [_ours(one, measure, name_rounds)]
    if paper is not None:
        parts.append(paper_text(paper, measure))
    if paper is not None and one.spread is not None:
        parts.append(_difference(one.spread.mean, paper.mean, measure.digits))
    return " / ".join(parts)


def _ours(one: Measured, measure: Measure, name_rounds: bool) -> str:
    if one.result.rounds is None:
        return NOT_RUN
    if one.spread is None:
        return one.why_not
    text = f"**{paper_text(Value(one.spread.mean, one.spread.stderr), measure)}**"
    if one.why_not:
        text += f" ({len(one.values)} of {len(one.result.runs)} seeds, others {one.why_not})"
    if one.result.data:
        text += "†"
    named = name_rounds or one.result.rounds != one.result.cell.rounds
    return text + (f" ({one.result.rounds:,} rounds)" if named else "")


def paper_text(value: Value, measure: Measure) -> str:
    """Return a number with its error, rounded as the measure says."""
    error = "" if value.stderr is None else f" ± {rounded(value.stderr, measure.digits)}"
    return rounded(value.mean, measure.digits) + error + (" (derived)" if value.derived else "")


def _difference(ours: float, paper: float, digits: int) -> str:
    """Return the difference of the two numbers as they are shown, so that a reader finds the same."""
    text = rounded(float(rounded(ours, digits)) - float(rounded(paper, digits)), digits)
    return text if text.startswith("-") or float(text) == 0 else f"+{text}"


def holders_table(one: Exhibit) -> str:
    """Return a table of how unevenly images are divided among clients, with seed 0."""
    lines = []
    for part in one.parts:
        counts = holders(part.cells[0])
        sizes = sorted(counts.sum(0).tolist())
        # How many of a client's largest classes make up that share of its images.
        shares = np.sort(counts, axis=0)[::-1].cumsum(axis=0) / counts.sum(0)
        main_classes = median(1 + (shares < MOST).sum(axis=0))
        numbers = (sizes[0], median(sizes), sizes[-1], main_classes)
        lines.append([part.title, *(f"{number:,g}" for number in numbers)])
    head = ("distribution", "fewest images of a client", "median", "most")
    return markdown((*head, "classes that make 90 % of a client's images, median"), lines)


# --- the runs behind the numbers -------------------------------------------------------------------


def _behind(parts: Parts) -> list[str]:
    """Return a table of the rounds, seeds, data and runs of every number; equal runs are listed once."""
    sources: dict[tuple[Path, ...], list[str]] = {}
    for _, cells in parts:
        for one in cells:
            paths = tuple(indexed.path for indexed in one.result.runs)
            if paths and paths not in sources:
                sources[paths] = _source(one)
    if not sources:
        return []
    head = ("behind these numbers", "rounds", "seeds", "data", "runs")
    return [markdown(head, sources.values()), ""]


def _source(one: Measured) -> list[str]:
    cell, result = one.result.cell, one.result
    fewer = "" if result.rounds == cell.rounds else f" of {cell.rounds:,}"
    places = [f"`{run.path.as_posix()}`" for run in result.runs]
    name = cell.row if cell.target is not None else f"{cell.row}, {cell.column}"
    data = result.data or set_title(cell.preset)
    seeds = str(len(result.runs))
    return [name, f"{result.rounds:,}{fewer}", seeds, data, ", ".join(places)]


def data_notes(cells: Sequence[Measured]) -> list[str]:
    """Return a note for every data set of the paper that was replaced."""
    replaced = (cell.result for cell in cells if cell.result.data)
    data = {set_title(result.cell.preset): result.data for result in replaced}
    return [f"† {name} here: {called}." for name, called in data.items()]


def _general_notes(cells: Sequence[Measured]) -> list[str]:
    fewer = any(cell.result.rounds not in (None, cell.result.cell.rounds) for cell in cells)
    methods = dict.fromkeys(cell.result.cell.method for cell in cells)
    notes = [f"\\* {title_of(name)}: {note_of(name)}." for name in methods if note_of(name)]
    return [FEWER, *notes] if fewer else notes


# --- who holds what --------------------------------------------------------------------------------

IMAGES_PER_CLASS = {"cifar10": 5000}
MOST = 0.9
"""The table counts the classes that make up this share of a client's images."""


def holders(cell: Cell) -> np.ndarray:
    """Return the images of each class that every client has by seed 0: counts [class, client].

    The number of images of each class is exact. Which image belongs to whom depends on the data's order.
    """
    config = cell.config(seed=0)
    kind = config.data.partition.kind
    assert kind != "folders" and kind != "own"
    classes = DATA[config.data.name].classes
    labels = np.repeat(np.arange(classes), IMAGES_PER_CLASS[config.data.name])
    partition = split(
        labels,
        labeled=config.data.labeled,
        clients=config.clients.total,
        kind=kind,
        alpha=config.data.partition.alpha,
        seed=config.seed,
        classes=classes,
    )
    counts = [np.bincount(labels[images], minlength=classes) for images in partition.clients]
    return np.stack(counts, axis=1)
