"""A table or figure as Markdown: the paper's value, ours, and how they differ, a row per cell."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from semisfl.lookup import note_of
from semisfl.paper.grid import METHODS, Exhibit, Part, Value
from semisfl.paper.holders import holders
from semisfl.paper.measures import MEASURES, Measure, rounded
from semisfl.paper.records import Record, Records, Result
from semisfl.paper.stand_ins import set_title
from semisfl.runs.report import Spread

NOT_RUN = "not run"
NOTHING = "–"
FEWER = (
    "A run with fewer rounds is another experiment: its learning rate decays over the rounds it has, so "
    "its difference from the paper is not the method's."
)


@dataclass(frozen=True)
class Measured:
    """A cell with what was measured for it."""

    result: Result
    values: tuple[float, ...]
    """One per run that has the number."""

    @property
    def spread(self) -> Spread | None:
        return Spread.of(self.values) if self.values else None

    @property
    def difference(self) -> float | None:
        paper, ours = self.result.cell.paper, self.spread
        return None if paper is None or ours is None else ours.mean - paper.mean


def measured(part: Part, records: Records, rounds: int | None = None) -> list[Measured]:
    if part.shown == "holders":  # nothing was trained for it
        return []
    found = []
    for cell in part.cells:
        result = records.result(cell, rounds)
        read = [MEASURES[part.measure].of(record.run, cell) for record in result.records]
        found.append(Measured(result, tuple(value for value in read if value is not None)))
    return found


def exhibit(
    one: Exhibit,
    parts: Sequence[tuple[Part, Sequence[Measured]]],
    picture: str | None = None,
    beside: Path | None = None,
    level: int = 2,
) -> str:
    """The whole text; links go from the folder ``beside`` to pictures and runs."""
    lines = [f"{'#' * level} {one.heading}", ""]
    for part, cells in parts:
        if part.shown != "holders":
            lines += [*table(part, cells, beside), ""]
    if one.parts[0].shown == "holders":
        lines += [*holders_table(one), ""]
    lines += [f"- {note}" for note in _notes(one, [cell for _, cells in parts for cell in cells])]
    if picture is not None:
        lines += ["", f"![{one.label or one.title}]({picture})"]
    return "\n".join(lines).strip() + "\n"


def table(part: Part, cells: Sequence[Measured], beside: Path | None = None) -> list[str]:
    measure = MEASURES[part.measure]
    headings = [
        part.rows,
        part.columns or "of",
        "paper",
        "here",
        "difference",
        "rounds",
        "seeds",
        "data",
    ]
    rows = [_row(cell, measure, beside) for cell in cells]
    return [
        f"**{part.title}**",
        "",
        f"| {' | '.join(headings)} |",
        f"|{'---|' * len(headings)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def holders_table(one: Exhibit) -> list[str]:
    """How unevenly images fall to clients, with seed 0."""
    lines = [
        "| distribution | fewest images of a client | median | most | classes that make 90 % of a client's images, median |",
        "|---|---|---|---|---|",
    ]
    for part in one.parts:
        found = holders(part.cells[0])
        sizes = found.sizes
        numbers = (sizes[0], sizes[len(sizes) // 2], sizes[-1], found.main_classes)
        lines.append(f"| {part.title} | {' | '.join(f'{number:,g}' for number in numbers)} |")
    return lines


def _row(one: Measured, measure: Measure, beside: Path | None) -> list[str]:
    cell, result = one.result.cell, one.result
    mark = "\\*" if note_of(cell.method) else ""
    names = [cell.row + mark, cell.column, paper_text(cell.paper, measure)]
    if result.rounds is None:
        return [*names, _unfinished(result), *[NOTHING] * 4]
    return [
        *names,
        _ours(one, measure, beside),
        NOTHING if one.difference is None else _signed(one.difference, measure.digits),
        f"{result.rounds:,}" + ("" if result.rounds == cell.rounds else f" of {cell.rounds:,}"),
        _seeds(one),
        result.data or set_title(cell.preset),
    ]


def paper_text(value: Value | None, measure: Measure) -> str:
    if value is None:
        return NOTHING
    error = "" if value.stderr is None else f" ± {rounded(value.stderr, measure.digits)}"
    return rounded(value.mean, measure.digits) + error


def _ours(one: Measured, measure: Measure, beside: Path | None) -> str:
    if one.spread is None:
        return measure.missing
    text = rounded(one.spread.mean, measure.digits)
    if one.spread.stderr is not None:
        text += f" ± {rounded(one.spread.stderr, measure.digits)}"
    if beside is None:
        return text
    return f"[{text}]({_link(one.result.records[0], beside)})"


def _link(record: Record, beside: Path) -> str:
    return Path(os.path.relpath(record.path, beside.resolve())).as_posix()


def _seeds(one: Measured) -> str:
    runs, counted = len(one.result.records), len(one.values)
    return f"{runs}" if counted in (0, runs) else f"{counted} of {runs}"


def _unfinished(result: Result) -> str:
    if not result.unfinished:
        return NOT_RUN
    run = result.unfinished[0].run
    done = run.rows[-1].round + 1 if run.rows else 0
    return f"unfinished: round {done} of {run.config['rounds']:,}"


def _signed(difference: float, digits: int) -> str:
    text = rounded(difference, digits)
    return text if text.startswith("-") or float(text) == 0 else f"+{text}"


def _notes(one: Exhibit, cells: Sequence[Measured]) -> list[str]:
    notes = list(one.notes)
    if any(cell.result.rounds not in (None, cell.result.cell.rounds) for cell in cells):
        notes.append(FEWER)
    methods = dict.fromkeys(cell.result.cell.method for cell in cells if cell.values)
    notes += [
        f"\\* {METHODS.get(name, name)}: {note_of(name)}." for name in methods if note_of(name)
    ]
    return notes
