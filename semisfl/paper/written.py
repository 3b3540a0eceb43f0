"""A table or figure as Markdown: ours, the paper's value and how they differ, and the runs behind."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from semisfl.paper.grid import METHODS, Exhibit, Part, Value
from semisfl.paper.holders import holders
from semisfl.paper.measures import MEASURES, Measure, rounded
from semisfl.paper.records import Record, Records, Result
from semisfl.paper.stand_ins import set_title
from semisfl.runs.report import Spread
from semisfl.settings.lookup import note_of

NOT_RUN = "not run"
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
    why_not: str = ""
    """Why the first one that has none does not."""

    @property
    def spread(self) -> Spread | None:
        return Spread.of(self.values) if self.values else None

    @property
    def difference(self) -> float | None:
        paper, ours = self.result.cell.paper, self.spread
        return None if paper is None or ours is None else ours.mean - paper.mean


Parts = Sequence[tuple[Part, Sequence[Measured]]]


def measured(part: Part, records: Records, rounds: int | None = None) -> list[Measured]:
    if part.shown == "holders":  # nothing is trained for it
        return []
    found = []
    for cell in part.cells:
        result = records.result(cell, rounds)
        read = [MEASURES[part.measure].of(record.run, cell) for record in result.records]
        numbers = tuple(value for value in read if not isinstance(value, str))
        reasons = [value for value in read if isinstance(value, str)]
        found.append(Measured(result, numbers, reasons[0] if reasons else ""))
    return found


def exhibit(
    one: Exhibit,
    parts: Parts,
    beside: Path,
    picture: str | None = None,
    *,
    alone: bool = True,
) -> str:
    """The whole text, without a heading; links to runs go from the folder ``beside``.

    Unless it stands ``alone``, what is true of many tables is left to the document around it.
    """
    lines: list[str] = []
    if one.parts[0].shown == "holders":
        lines += [*holders_table(one), ""]
    for part, cells in parts:
        if cells:
            lines += [*table(part, cells), ""]
    lines += _behind(parts, beside)
    everything = [cell for _, cells in parts for cell in cells]
    notes = [*one.notes, *data_notes(everything), *(_general_notes(everything) if alone else ())]
    lines += [f"- {note}" for note in notes]
    if picture is not None:
        lines += [*([""] if notes else []), f"![{one.label or one.title}]({picture})"]
    return "\n".join(lines).strip() + "\n"


def table(part: Part, cells: Sequence[Measured]) -> list[str]:
    """Rows and columns as in the paper; in each place ours, its value and the difference."""
    measure = MEASURES[part.measure]
    # Beside runs with fewer rounds, those with all of them say so too.
    mixed = len({cell.result.rounds for cell in cells} - {None}) > 1
    columns = list(dict.fromkeys(cell.result.cell.column for cell in cells))
    rows = list(dict.fromkeys(cell.result.cell.row for cell in cells))
    places = {(cell.result.cell.row, cell.result.cell.column): cell for cell in cells}
    told = "here"
    if any(cell.result.cell.paper for cell in cells):
        told += " / paper / difference"
    lines = [
        f"**{part.title}**: {told}",
        "",
        f"| {part.rows} | {' | '.join(columns)} |",
        "|---|" + "---|" * len(columns),
    ]
    for row in rows:
        there = [places.get((row, column)) for column in columns]
        method = next(cell.result.cell.method for cell in there if cell)
        mark = "\\*" if note_of(method) else ""
        texts = [cell_text(cell, measure, mixed) if cell else "" for cell in there]
        lines.append(f"| {row}{mark} | {' | '.join(texts)} |")
    return lines


def cell_text(one: Measured, measure: Measure, name_rounds: bool = False) -> str:
    paper = one.result.cell.paper
    parts = [_ours(one, measure, name_rounds)]
    if paper is not None:
        parts.append(paper_text(paper, measure))
    if one.difference is not None:
        parts.append(_signed(one.difference, measure.digits))
    return " / ".join(parts)


def _ours(one: Measured, measure: Measure, name_rounds: bool) -> str:
    if one.result.rounds is None:
        return _unfinished(one.result)
    if one.spread is None:
        return one.why_not
    text = f"**{paper_text(Value(one.spread.mean, one.spread.stderr), measure)}**"
    if one.why_not:
        text += f" ({len(one.values)} of {len(one.result.records)} seeds, others {one.why_not})"
    if one.result.data:
        text += "†"
    named = name_rounds or one.result.rounds != one.result.cell.rounds
    return text + (f" ({one.result.rounds:,} rounds)" if named else "")


def paper_text(value: Value, measure: Measure) -> str:
    error = "" if value.stderr is None else f" ± {rounded(value.stderr, measure.digits)}"
    return rounded(value.mean, measure.digits) + error + (" (derived)" if value.derived else "")


def _unfinished(result: Result) -> str:
    if not result.unfinished:
        return NOT_RUN
    run = result.unfinished[0].run
    done = run.rounds[-1].round + 1 if run.rounds else 0
    return f"unfinished (round {done} of {run.config['rounds']:,})"


def _signed(difference: float, digits: int) -> str:
    text = rounded(difference, digits)
    return text if text.startswith("-") or float(text) == 0 else f"+{text}"


def holders_table(one: Exhibit) -> list[str]:
    """How unevenly images fall to clients, with seed 0."""
    lines = [
        "| distribution | fewest images of a client | median | most | classes that make 90 % of a client's images, median |",
        "|---|---|---|---|---|",
    ]
    for part in one.parts:
        found = holders(part.cells[0])
        sizes = found.sizes
        numbers = (sizes[0], median(sizes), sizes[-1], found.main_classes)
        lines.append(f"| {part.title} | {' | '.join(f'{number:,g}' for number in numbers)} |")
    return lines


# --- the runs behind the numbers -------------------------------------------------------------------


def _behind(parts: Parts, beside: Path) -> list[str]:
    """Rounds, seeds and data of every number, each run once."""
    rows: dict[tuple[Path, ...], list[str]] = {}
    for _, cells in parts:
        for one in cells:
            paths = tuple(record.path for record in one.result.records)
            if paths and paths not in rows:
                rows[paths] = _behind_row(one, beside)
    if not rows:
        return []
    headings = ("behind these numbers", "rounds", "seeds", "data", "runs")
    return [
        f"| {' | '.join(headings)} |",
        "|---|" + "---|" * (len(headings) - 1),
        *(f"| {' | '.join(row)} |" for row in rows.values()),
        "",
    ]


def _behind_row(one: Measured, beside: Path) -> list[str]:
    cell, result = one.result.cell, one.result
    fewer = "" if result.rounds == cell.rounds else f" of {cell.rounds:,}"
    links = (f"[seed {record.config.seed}]({_link(record, beside)})" for record in result.records)
    name = cell.row if cell.target is not None else f"{cell.row}, {cell.column}"
    data = result.data or set_title(cell.preset)
    seeds = str(len(result.records))
    return [name, f"{result.rounds:,}{fewer}", seeds, data, ", ".join(links)]


def _link(record: Record, beside: Path) -> str:
    return Path(os.path.relpath(record.path, beside.resolve())).as_posix()


def data_notes(cells: Sequence[Measured]) -> list[str]:
    """What stood in for the paper's data sets."""
    found = (cell.result for cell in cells if cell.result.data)
    data = {set_title(result.cell.preset): result.data for result in found}
    return [f"† {name} here: {called}." for name, called in data.items()]


def _general_notes(cells: Sequence[Measured]) -> list[str]:
    fewer = any(cell.result.rounds not in (None, cell.result.cell.rounds) for cell in cells)
    methods = dict.fromkeys(cell.result.cell.method for cell in cells)
    notes = [
        f"\\* {METHODS.get(name, name)}: {note_of(name)}." for name in methods if note_of(name)
    ]
    return [FEWER, *notes] if fewer else notes


def as_json(one: Exhibit, parts: Parts) -> dict[str, Any]:
    return {
        "name": one.name,
        "label": one.label,
        "title": one.title,
        "cells": [
            {
                "part": part.title,
                "row": cell.result.cell.row,
                "column": cell.result.cell.column,
                "measure": part.measure,
                "paper": vars(cell.result.cell.paper) if cell.result.cell.paper else None,
                "here": vars(cell.spread) if cell.spread else None,
                "rounds": cell.result.rounds,
                "data": cell.result.data or None,
                "runs": [str(record.path) for record in cell.result.records],
            }
            for part, cells in parts
            for cell in cells
        ],
    }
