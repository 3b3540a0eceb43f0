"""What is read off a run: one number for a table, or a curve over its rounds."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from statistics import fmean, median, pvariance
from typing import TYPE_CHECKING

from semisfl.metrics import RoundMetrics
from semisfl.paper.grid import Cell
from semisfl.runs.grouping import Run

if TYPE_CHECKING:
    from semisfl.costs.clock import World

PERIOD = 10
"""Rounds whose mean loss is one observation, as in the paper."""
FALLS = 10
"""Of them R_h is the share in which the semi-supervised loss fell more."""
CALM_ROUNDS, CALM_VARIANCE = 50, 0.01
"""Over so many rounds in a row the loss varies less than this: the paper's equilibrium."""

UNKNOWN, NEVER = "not recorded", "not reached"
LATENCY, PROFILE = 0.005, "jetson-mix"
"""Assumed for the paper's testbed: seconds per message, and what its devices compute."""

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Measure:
    title: str
    of: Callable[[Run, Cell], float | str]
    """The number, or why a finished run has none."""
    digits: int = 1


def _last(key: str, scale: float = 1.0) -> Callable[[Run, Cell], float | str]:
    """The last value that a run has under a key of its metrics."""

    def read(run: Run, cell: Cell) -> float | str:
        values = [value for row in run.rounds if (value := getattr(row, key)) is not None]
        return scale * values[-1] if values else UNKNOWN

    return read


def _rows_to_target(run: Run, cell: Cell) -> list[RoundMetrics] | None:
    assert cell.target is not None
    for place, row in enumerate(run.rounds, 1):
        if row.accuracy is not None and row.accuracy >= cell.target:
            return run.rounds[:place]
    return None


def _gigabytes(run: Run, cell: Cell) -> float | str:
    rows = _rows_to_target(run, cell)
    if rows is None:
        return NEVER
    total = rows[-1].bytes_total
    return UNKNOWN if total is None else total / 1e9


def _hours(run: Run, cell: Cell) -> float | str:
    """On the virtual clock, over the paper's links on devices like its own."""
    from semisfl.costs.replay import replay  # loads torch: only who asks for time waits for it

    rows = _rows_to_target(run, cell)
    if rows is None:
        return NEVER
    try:
        timed = replay(replace(run, rounds=rows), paper_world())
    except ValueError:  # what it sent, or of which shape its images were, is not known here
        return "not timed"
    return sum(timed.seconds) / 3600


@cache
def paper_world() -> "World":
    from semisfl.costs import profiles
    from semisfl.costs.clock import PAPER_DOWN, PAPER_UP, Range, World

    up, down = (Range.parse(text, "link") for text in (PAPER_UP, PAPER_DOWN))
    return World(up, down, LATENCY, profiles.load(PROFILE))


def _equilibrium(run: Run, cell: Cell) -> float | str:
    losses = [loss for _, loss in total_loss(run.rounds)]
    for end in range(CALM_ROUNDS, len(losses) + 1):
        if pvariance(losses[end - CALM_ROUNDS : end]) < CALM_VARIANCE:
            return end
    return NEVER


def _median_steps(run: Run, cell: Cell) -> float | str:
    steps = [row.supervised_steps for row in run.rounds if row.supervised_steps is not None]
    return median(steps) if steps else UNKNOWN


def _last_share(run: Run, cell: Cell) -> float | str:
    shares = semi_faster_share(run.rounds)
    return shares[-1][1] if shares else "too few rounds"


def _last_loss(run: Run, cell: Cell) -> float | str:
    losses = total_loss(run.rounds)
    return losses[-1][1] if losses else UNKNOWN


# --- curves ---------------------------------------------------------------------------------------


def column(key: str) -> Callable[[Sequence[RoundMetrics]], Points]:
    def points(rows: Sequence[RoundMetrics]) -> Points:
        return [(row.round + 1, value) for row in rows if (value := getattr(row, key)) is not None]

    return points


def total_loss(rows: Sequence[RoundMetrics]) -> Points:
    return [
        (row.round + 1, row.loss_supervised + row.loss_semi)
        for row in rows
        if row.loss_supervised is not None and row.loss_semi is not None
    ]


def falls(key: str) -> Callable[[Sequence[RoundMetrics]], Points]:
    """How much less the mean loss of a period is than that of the one before it."""

    def points(rows: Sequence[RoundMetrics]) -> Points:
        values = column(key)(rows)
        means = [
            (values[end - 1][0], fmean(value for _, value in values[end - PERIOD : end]))
            for end in range(PERIOD, len(values) + 1, PERIOD)
        ]
        return [(now[0], before[1] - now[1]) for before, now in pairwise(means)]

    return points


def semi_faster_share(rows: Sequence[RoundMetrics]) -> Points:
    """R_h: of the last falls, the share in which the semi-supervised loss fell more."""
    semi, supervised = falls("loss_semi")(rows), falls("loss_supervised")(rows)
    faster = [
        (place, float(ours > theirs))
        for (place, ours), (_, theirs) in zip(semi, supervised, strict=False)
    ]
    return [
        (faster[end - 1][0], fmean(one for _, one in faster[end - FALLS : end]))
        for end in range(FALLS, len(faster) + 1)
    ]


CURVES: dict[str, tuple[str, Callable[[Sequence[RoundMetrics]], Points]]] = {
    "accuracy": ("test accuracy (%)", column("accuracy")),
    "loss_semi": ("semi-supervised loss", column("loss_semi")),
    "loss_supervised": ("supervised loss", column("loss_supervised")),
    "loss": ("sum of both losses", total_loss),
    "fall_supervised": ("Δf_s, supervised", falls("loss_supervised")),
    "fall_semi": ("Δf_u, semi-supervised", falls("loss_semi")),
    "semi_faster_share": ("R_h", semi_faster_share),
}
MEASURES = {
    "accuracy": Measure("test accuracy (%)", _last("accuracy")),
    "hours": Measure("virtual hours", _hours),
    "gigabytes": Measure("GB", _gigabytes),
    "mask_rate": Measure("mask rate (%)", _last("mask_rate", 100)),
    "impurity": Measure("impurity (%)", _last("impurity", 100)),
    "equilibrium": Measure("rounds", _equilibrium, digits=0),
    "supervised_steps": Measure("median K_s", _median_steps, digits=0),
    "loss_semi": Measure("loss", _last("loss_semi"), digits=3),
    "loss_supervised": Measure("loss", _last("loss_supervised"), digits=3),
    "loss": Measure("loss", _last_loss, digits=3),
    "semi_faster_share": Measure("R_h", _last_share, digits=2),
}


def rounded(value: float, digits: int) -> str:
    """Without a minus before nothing but zeros."""
    text = f"{value:.{digits}f}"
    return text.lstrip("-") if math.isclose(float(text), 0) else text
