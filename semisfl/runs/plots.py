"""What run directories say, as pictures. Imports nothing that trains."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from semisfl.files import save_picture
from semisfl.metrics import RoundMetrics
from semisfl.runs.report import Group, Spread, accuracy_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GIGA = 1e9
Axis = Callable[[list[RoundMetrics]], list[float]]


def _running_seconds(rows: list[RoundMetrics]) -> list[float]:
    return list(accumulate(math.nan if row.seconds is None else row.seconds for row in rows))


# Positions of rows; NaN where a file does not say.
AXES: dict[str, Axis] = {
    "round": lambda rows: [row.round + 1 for row in rows],
    "GB sent": lambda rows: [
        math.nan if row.bytes_total is None else row.bytes_total / GIGA for row in rows
    ],
    "seconds": _running_seconds,
    "virtual hours": lambda rows: [seconds / 3600 for seconds in _running_seconds(rows)],
}
STYLES = ("-", "--", ":", "-.")
COLUMNS = 3


@dataclass(frozen=True)
class Panel:
    """One picture of a report: some columns of the metrics against an axis."""

    title: str
    axis: str
    columns: tuple[str, ...]


# Their title is what the runs were judged on.
ACCURACY = tuple(Panel("", axis, ("accuracy",)) for axis in ("round", "GB sent", "seconds"))
COSTS = tuple(Panel("", axis, ("accuracy",)) for axis in ("virtual hours", "GB sent"))
TRAINING = (
    Panel("losses", "round", ("loss_supervised", "loss_semi")),
    Panel("supervised steps per round, K_s", "round", ("supervised_steps",)),
    Panel("pseudo-labels (%)", "round", ("mask_rate", "impurity")),
)
LEGENDS = {
    "loss_supervised": "labelled",
    "loss_semi": "unlabelled",
    "mask_rate": "unused (mask rate)",
    "impurity": "wrong among used (impurity)",
}
PERCENT = ("mask_rate", "impurity")


def draw(
    groups: Sequence[Group], path: Path, panels: Sequence[Panel] = ACCURACY + TRAINING
) -> None:
    """The picture of some groups, as a file."""
    save_picture(picture(groups, panels), path)


def picture(groups: Sequence[Group], panels: Sequence[Panel] = ACCURACY + TRAINING) -> "Figure":
    """Curves: the mean over seeds, and a band of one standard error where there are several."""
    from matplotlib.figure import Figure  # heavy, and only wanted here
    from matplotlib.lines import Line2D

    labels = [_legend(group) for group in groups]
    # About 0.08 inch per letter, and the line before them.
    fitting = int(4.4 * COLUMNS / (0.08 * max(map(len, labels)) + 0.8))
    legend_columns = max(1, min(len(groups), fitting))
    legend_lines = math.ceil(len(groups) / legend_columns)
    lines = math.ceil(len(panels) / COLUMNS)
    size = (4.4 * COLUMNS, 3.3 * lines + 0.25 * (legend_lines + 1))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(lines, COLUMNS, squeeze=False).flatten()
    for axes, panel in zip(grid, panels, strict=False):
        _draw_panel(axes, panel, groups)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    handles = [Line2D([], [], color=f"C{place % 10}", lw=2) for place in range(len(groups))]
    figure.legend(handles, labels, loc="outside upper center", ncols=legend_columns, frameon=False)
    return figure


def _legend(group: Group) -> str:
    seeds = f"{len(group.runs)} seeds" if len(group.runs) > 1 else ""
    state = "" if group.finished else "unfinished"
    about = ", ".join(part for part in (seeds, state) if part)
    return group.label + (f" ({about})" if about else "")


def _draw_panel(axes: "Axes", panel: Panel, groups: Sequence[Group]) -> None:
    drawn = set()
    for place, group in enumerate(groups):
        for style, column in zip(STYLES, panel.columns, strict=False):
            x, mean, error = _curve(group, panel.axis, column)
            if not x:
                continue
            drawn.add((style, column))
            colour = f"C{place % 10}"
            if panel.axis == "GB sent" and x[-1] == 0:
                # Nothing is sent: a level to beat, not a curve.
                axes.axhline(mean[-1], color=colour, ls=":", lw=1.5)
                continue
            axes.plot(x, mean, style, color=colour, lw=1.5, marker="." if len(x) < 3 else "")
            if len(group.runs) > 1:
                low = [m - e for m, e in zip(mean, error, strict=True)]
                high = [m + e for m, e in zip(mean, error, strict=True)]
                axes.fill_between(x, low, high, color=colour, alpha=0.2, lw=0)
    if panel in TRAINING:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(panel.axis)
    judged = accuracy_of(group.judged_on for group in groups)
    axes.set_title(panel.title or f"{judged} (%)", fontsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if not drawn:
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes, color="grey")
    elif len(panel.columns) > 1:
        for style, column in sorted(drawn, key=lambda pair: STYLES.index(pair[0])):
            axes.plot([], [], style, color="grey", label=LEGENDS[column])
        axes.legend(fontsize=8, frameon=False)


def _curve(group: Group, axis: str, column: str) -> tuple[list[float], list[float], list[float]]:
    """Over the rounds that every run of the group has: positions, means, standard errors."""
    scale = 100.0 if column in PERCENT else 1.0
    points: list[dict[int, tuple[float, float]]] = []
    for run in group.runs:
        positions = AXES[axis](run.rounds)
        points.append(
            {
                row.round: (position, scale * getattr(row, column))
                for row, position in zip(run.rounds, positions, strict=True)
                if getattr(row, column) is not None and not math.isnan(position)
            }
        )
    x, mean, error = [], [], []
    for number in sorted(set.intersection(*(set(one) for one in points))):
        spread = Spread.of([one[number][1] for one in points])
        x.append(fmean(one[number][0] for one in points))
        mean.append(spread.mean)
        error.append(spread.stderr or 0.0)
    return x, mean, error
