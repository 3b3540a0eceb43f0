"""Draw pictures of groups of runs, with matplotlib and its own style. Imports nothing that trains.

A picture has a chart of accuracy for each axis (rounds, gigabytes, minutes) and one for each panel that the metrics of
the methods declare. Groups have colours, the metrics of a panel have line styles.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from semisfl.files import save_picture
from semisfl.metrics import AXES, Axis, Metric, Panel, RoundMetrics, panels_of
from semisfl.runs.declared import metrics_of
from semisfl.runs.report import Group, Spread, accuracy_of
from semisfl.settings.counts import amount

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROUNDS, GIGABYTES, MINUTES = AXES
VIRTUAL_HOURS = Axis("virtual hours", "seconds", 1 / 3600, summed=True)
STYLES = ("-", "--", ":", "-.")
COLUMNS = 3
ACCURACY = Metric(key="accuracy")


@dataclass(frozen=True)
class Chart:
    """One chart of a picture: some metrics against an axis."""

    axis: Axis = ROUNDS
    metrics: tuple[Metric, ...] = (ACCURACY,)
    panel: Panel | None = None
    """None: the title says which images the runs were judged on."""


ACCURACIES = tuple(Chart(axis) for axis in AXES)
COSTS = tuple(Chart(axis) for axis in (VIRTUAL_HOURS, GIGABYTES))


def all_charts(groups: Sequence[Group]) -> tuple[Chart, ...]:
    """Return the charts of accuracy and of every panel that belongs into a picture.

    The panels are those of all methods of ``groups``; one that a method lacks has no line of it.
    """
    panels = panels_of(metrics_of(group.method for group in groups).values())
    training = (Chart(ROUNDS, tuple(m), panel) for panel, m in panels.items() if panel.in_picture)
    return (*ACCURACIES, *training)


def draw(groups: Sequence[Group], path: Path, charts: Sequence[Chart] = ()) -> None:
    """Write the `picture` of some groups to the file ``path``, in the format that its suffix names.

    Raises OSError if it cannot be written; a previous file is then unchanged.
    """
    save_picture(picture(groups, charts), path)


def picture(groups: Sequence[Group], charts: Sequence[Chart] = ()) -> "Figure":
    """Return a figure of ``charts``, or of all of them: means over seeds, with a band of one standard error.

    Rounds that not every run of a group has are left out of its curves.
    """
    from matplotlib.figure import Figure  # heavy, and only wanted here
    from matplotlib.lines import Line2D

    charts = charts or all_charts(groups)
    lines = math.ceil(len(charts) / COLUMNS)
    size = (4.4 * COLUMNS, 3.3 * lines + 0.125 * (len(groups) + 3))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(lines, COLUMNS, squeeze=False).flatten()
    for axes, chart in zip(grid, charts, strict=False):
        _draw_chart(axes, chart, groups)
    for axes in grid[len(charts) :]:
        axes.set_visible(False)
    handles = [Line2D([], [], color=f"C{place % 10}") for place in range(len(groups))]
    labels = [_legend(group) for group in groups]
    figure.legend(handles, labels, loc="outside upper center", ncols=2)
    return figure


def _legend(group: Group) -> str:
    """Return a group's label with the number of its seeds, and whether it is unfinished."""
    seeds = f"{len(group.runs)} seeds" if len(group.runs) > 1 else ""
    state = "" if group.finished else "unfinished"
    about = ", ".join(part for part in (seeds, state) if part)
    return group.label + (f" ({about})" if about else "")


def _draw_chart(axes: "Axes", chart: Chart, groups: Sequence[Group]) -> None:
    """Draw the curves of all groups into one chart, with its titles."""
    drawn = set()
    for place, group in enumerate(groups):
        for style, metric in zip(cycle(STYLES), chart.metrics, strict=False):
            x, mean, error = _curve(group, chart, metric.key)
            if not x:
                continue
            drawn.add(metric.key)
            colour = f"C{place % 10}"
            if chart.axis == GIGABYTES and x[-1] == 0:
                # Nothing is sent: a level to beat, not a curve.
                axes.axhline(mean[-1], color=colour, ls=":")
                continue
            if chart.axis == GIGABYTES and x[0] == x[-1]:
                # All is sent in the first round: one point.
                x, mean, error = x[-1:], mean[-1:], error[-1:]
            axes.plot(x, mean, style, color=colour, marker="." if len(x) < 3 else "")
            if len(group.runs) > 1:
                low = [m - e for m, e in zip(mean, error, strict=True)]
                high = [m + e for m, e in zip(mean, error, strict=True)]
                axes.fill_between(x, low, high, color=colour, alpha=0.2, lw=0)
    if (panel := chart.panel) is not None:
        axes.set_ylim(bottom=0)
        title = panel.title + (f" ({panel.unit})" if panel.unit else "")
    else:
        title = f"{accuracy_of(group.judged_on for group in groups)} (%)"
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(chart.axis.title)
    if chart.axis == GIGABYTES:
        axes.set_xlim(left=0)
        axes.set_xlabel("sent")
        axes.xaxis.set_major_formatter(lambda value, _: amount(value / GIGABYTES.scale))
        axes.locator_params(axis="x", nbins=5)
    if chart.axis == ROUNDS:
        whole = {"integer": True, "min_n_ticks": 1}  # there is no round 1.5
        axes.xaxis.get_major_locator().set_params(**whole)
    axes.grid(alpha=0.25)
    if not drawn:
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes, color="grey")
    elif len(chart.metrics) > 1:
        for style, metric in zip(cycle(STYLES), chart.metrics, strict=False):
            if metric.key in drawn:
                axes.plot([], [], style, color="grey", label=metric.line or "all")
        axes.legend()


def _curve(group: Group, chart: Chart, key: str) -> tuple[list[float], list[float], list[float]]:
    """Return positions, means and standard errors over the rounds that every run of the group has."""
    scale = chart.panel.scale if chart.panel is not None else 1.0
    points: list[dict[int, tuple[float, float]]] = []
    for run in group.runs:
        positions = _positions(chart.axis, run.rounds)
        points.append(
            {
                metrics.round: (position, scale * metrics.numbers()[key])
                for metrics, position in zip(run.rounds, positions, strict=True)
                if key in metrics.numbers() and not math.isnan(position)
            }
        )
    x, mean, error = [], [], []
    for number in sorted(set.intersection(*(set(one) for one in points))):
        spread = Spread.of([one[number][1] for one in points])
        x.append(fmean(one[number][0] for one in points))
        mean.append(spread.mean)
        error.append(spread.stderr or 0.0)
    return x, mean, error


def _positions(axis: Axis, rounds: Sequence[RoundMetrics]) -> list[float]:
    """Return where rounds lie on an axis, in its unit; NaN where the metrics do not say.

    An axis may sum the metric of the rounds so far, as time is, or read a total, as bytes are.
    """
    values = [getattr(metrics, axis.key) for metrics in rounds]
    known = [math.nan if value is None else value for value in values]
    return [
        axis.scale * value + axis.first for value in (accumulate(known) if axis.summed else known)
    ]
