"""Draw a table or figure: our numbers beside the paper's, one panel per part."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from reproduction.paper.grid import Exhibit, Part
from reproduction.paper.measures import CURVES, MEASURES, column
from reproduction.paper.written import Measured, Parts, data_notes, holders
from semisfl.files import save_picture
from semisfl.runs.report import Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Colours = Mapping[str, str]
"""A colour by the row of a table."""
STYLES = ("-", "--", ":")
WIDTH = 0.8
"""The width that the bars and points of one column share."""
GREY = "#888888"
HERE: dict[str, Any] = {"marker": "o"}
FEWER: dict[str, Any] = {"marker": "o", "alpha": 0.4}
PAPER: dict[str, Any] = {"marker": "D", "mfc": "white", "ms": 5}
NONE: dict[str, Any] = {"marker": "x", "ms": 4}


def draw(
    exhibit: Exhibit, parts: Parts, folder: Path, suffixes: Sequence[str] = ("png", "svg")
) -> list[Path]:
    """Write ``folder/NAME.png`` and ``.svg``, and return their paths."""
    from matplotlib import rc_context  # heavy, and only wanted here

    # With a fixed salt equal numbers give equal files, so a committed picture changes only with them.
    with rc_context({"svg.hashsalt": exhibit.name}):
        made = picture(exhibit, parts)
        files = [folder / f"{exhibit.name}.{suffix}" for suffix in suffixes]
        for file in files:
            stamp = "Software" if file.suffix == ".png" else "Date"
            save_picture(made, file, dpi=110, metadata={stamp: None})
    return files


def picture(exhibit: Exhibit, parts: Parts) -> "Figure":
    """Return the figure of an exhibit."""
    from matplotlib.figure import Figure

    across = 3 if len(parts) == 3 else min(len(parts), 2)
    down = math.ceil(len(parts) / across)
    wide = 9.0 if len(parts) == 1 else 5.2
    notes = data_notes([cell for _, cells in parts for cell in cells])
    high = 3.6 * down + 0.9 + 0.2 * len(notes)
    figure = Figure(figsize=(wide * across, high), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False).flatten()
    # One colour for a row in all panels.
    rows = list(dict.fromkeys(cell.result.cell.row for _, cells in parts for cell in cells))
    colours = {row: f"C{place % 10}" for place, row in enumerate(rows)}
    for axes, (part, cells) in zip(grid, parts, strict=False):
        PANELS[part.shown](axes, part, cells, colours)
        axes.set_title(part.title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[len(parts) :]:
        axes.set_visible(False)
    if rows:
        handles = _handles(parts, colours)
        # About 0.08 inch per letter, and the mark before them.
        longest = max(len(handle.get_label()) for handle in handles)
        fitting = max(1, int(figure.get_figwidth() / (0.08 * longest + 0.8)))
        columns = min(len(handles), fitting)
        letters = int(14 * figure.get_figwidth())  # of the notes' size, on a line
        figure.legend(
            handles=handles,
            loc="outside lower center",
            ncols=columns,
            frameon=False,
            title="\n".join(fill(note, letters) for note in notes),
            title_fontsize=8,
        )
    figure.suptitle(exhibit.heading, fontsize=11)
    return figure


def _handles(parts: Parts, colours: Colours) -> list[Any]:
    """Return the legend of colours and marks, shared by all panels."""
    from matplotlib.lines import Line2D

    def mark(label: str, **how: Any) -> Line2D:
        return Line2D([], [], color=GREY, ls="", label=label, **how)

    handles: list[Any] = [
        Line2D([], [], color=colour, lw=3, label=row) for row, colour in colours.items()
    ]
    marked = [one for part, cells in parts if part.shown in ("bars", "lines") for one in cells]
    if any(one.spread and not _fewer(one) for one in marked):
        handles.append(mark("here", **HERE))
    if any(one.spread and _fewer(one) for one in marked):
        handles.append(mark("here, fewer rounds", **FEWER))
    if any(one.result.cell.paper for one in marked):
        handles.append(mark("paper", **PAPER))
    if any(not one.spread for part, cells in parts if part.shown == "bars" for one in cells):
        handles.append(mark("not run, or not reached", **NONE))
    return handles


def _fewer(one: Measured) -> bool:
    return one.result.rounds is not None and one.result.rounds < one.result.cell.rounds


def _empty(axes: "Axes", text: str = "not run") -> None:
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color=GREY)
    axes.set_yticks([])


# --- points and bars over the columns of a table --------------------------------------------------


def _bars(axes: "Axes", part: Part, cells: Sequence[Measured], colours: Colours) -> None:
    """Draw accuracies as points, since they are far from 0, and other measures as bars."""
    rows = list(dict.fromkeys(cell.result.cell.row for cell in cells))
    columns = _columns(axes, part, cells)
    share = WIDTH / len(rows)
    for one in cells:
        cell = one.result.cell
        place = columns.index(cell.column) - WIDTH / 2 + share * (rows.index(cell.row) + 0.5)
        if one.spread is None:
            axes.plot([place], [0.03], color=GREY, transform=axes.get_xaxis_transform(), **NONE)
        elif part.measure != "accuracy":
            look: dict[str, Any] = {"color": colours[cell.row], "alpha": 0.5 if _fewer(one) else 1}
            axes.bar(place, one.spread.mean, 0.85 * share, yerr=one.spread.stderr, **look)
        _points(axes, place, one, colours[cell.row], ours=part.measure == "accuracy")
    axes.margins(y=0.12)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    if not any(one.spread or one.result.cell.paper for one in cells):
        _empty(axes)


def _lines(axes: "Axes", part: Part, cells: Sequence[Measured], colours: Colours) -> None:
    """Draw one line per row over the ordered columns, with gaps where a run is missing."""
    columns = _columns(axes, part, cells)
    for row, colour in colours.items():
        mine = {cell.result.cell.column: cell for cell in cells if cell.result.cell.row == row}
        there = [mine.get(column) for column in columns]
        height = [one.spread.mean if one and one.spread else math.nan for one in there]
        axes.plot(range(len(columns)), height, color=colour, lw=1)
        for place, one in enumerate(there):
            if one:
                _points(axes, place, one, colour)
    axes.grid(alpha=0.25)
    if not any(one.spread or one.result.cell.paper for one in cells):
        _empty(axes)


def _columns(axes: "Axes", part: Part, cells: Sequence[Measured]) -> list[str]:
    """Label the axis with the columns, and return them in order."""
    columns = list(dict.fromkeys(cell.result.cell.column for cell in cells))
    axes.set_xticks(range(len(columns)), columns)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_xlabel(part.columns)
    axes.set_ylabel(MEASURES[part.measure].title)
    return columns


def _points(axes: "Axes", place: float, one: Measured, colour: str, *, ours: bool = True) -> None:
    """Draw a cell's numbers with their errors: ours and the paper's."""
    look: dict[str, Any] = {"color": colour, "ls": "", "capsize": 2, "elinewidth": 1}
    if one.spread and ours:
        mark = FEWER if _fewer(one) else HERE
        axes.errorbar([place], [one.spread.mean], yerr=one.spread.stderr, **look, **mark)
    if paper := one.result.cell.paper:
        # On a bar of the same colour the mark would be invisible.
        look["color"] = colour if ours else "black"
        axes.errorbar([place], [paper.mean], yerr=paper.stderr, **look, **PAPER)


# --- curves, boxes and holders ---------------------------------------------------------------------


def _curves(axes: "Axes", part: Part, cells: Sequence[Measured], colours: Colours) -> None:
    """Draw every cell's curves over the rounds."""
    for one in cells:
        for key, style in zip(part.curves, STYLES, strict=False):
            _curve(axes, one, key, style, colours[one.result.cell.row])
    axes.set_xlabel("round")
    titles = [CURVES[key][0] for key in part.curves]
    axes.set_ylabel(titles[0] if len(titles) == 1 else "fall of the mean loss")
    axes.grid(alpha=0.25)
    if not axes.lines:
        _empty(axes)
    elif len(titles) > 1:
        for title, style in zip(titles, STYLES, strict=False):
            axes.plot([], [], style, color=GREY, label=title)
        axes.legend(fontsize=8, frameon=False)


def _curve(axes: "Axes", one: Measured, key: str, style: str, colour: str) -> None:
    """Draw the mean over seeds with a band of one standard error, for the rounds that all seeds have."""
    runs = [dict(CURVES[key][1](indexed.run.rounds)) for indexed in one.result.runs]
    rounds = sorted(set.intersection(*map(set, runs))) if runs else []
    spreads = [Spread.of([run[number] for run in runs]) for number in rounds]
    if not rounds:
        return
    axes.plot(rounds, [spread.mean for spread in spreads], style, color=colour, lw=1.3)
    if len(runs) > 1:
        low, high = (
            [spread.mean + sign * (spread.stderr or 0) for spread in spreads] for sign in (-1, 1)
        )
        axes.fill_between(rounds, low, high, color=colour, alpha=0.2, lw=0)


def _boxes(axes: "Axes", part: Part, cells: Sequence[Measured], colours: Colours) -> None:
    """Draw the distribution of K_s over the rounds of each cell's runs."""
    columns = _columns(axes, part, cells)
    for one in cells:
        place = columns.index(one.result.cell.column)
        runs = [column("supervised_steps")(indexed.run.rounds) for indexed in one.result.runs]
        if steps := [steps for run in runs for _, steps in run]:
            axes.boxplot([steps], positions=[place], widths=0.6, whis=(0, 100), manage_ticks=False)
        else:
            axes.plot([place], [0.03], color=GREY, transform=axes.get_xaxis_transform(), **NONE)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("K_s (box: half of the rounds)")


def _holders(axes: "Axes", part: Part, cells: Sequence[Measured], colours: Colours) -> None:
    """Draw each client's share of every class as a heat map."""
    counts = holders(part.cells[0])
    share = counts / counts.sum(axis=0)
    image = axes.imshow(share, aspect="auto", cmap="Blues", interpolation="nearest", vmin=0, vmax=1)
    axes.figure.colorbar(image, ax=axes, label="share of a client's images")
    axes.set_xlabel("client")
    axes.set_ylabel("class")


PANELS = {
    "bars": _bars,
    "lines": _lines,
    "curves": _curves,
    "boxes": _boxes,
    "holders": _holders,
}
