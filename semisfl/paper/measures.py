"""What is read off a run: one number for a table, or a curve over its rounds."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, pvariance

from semisfl.paper.grid import Cell
from semisfl.rows import RoundRow
from semisfl.runs.report import Run

PERIOD = 10
"""Rounds whose mean loss is one observation, as in the paper."""
FALLS = 10
"""Of them R_h is the share in which the semi-supervised loss fell more."""
CALM_ROUNDS, CALM_VARIANCE = 50, 0.01
"""Over so many rounds in a row the loss varies less than this: the paper's equilibrium."""

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Measure:
    title: str
    of: Callable[[Run, Cell], float | None]
    """None: the run's files do not say, or it never got there."""
    digits: int = 1
    missing: str = "not recorded"
    """What a finished run without the number means."""


def _last(key: str, scale: float = 1.0) -> Callable[[Run, Cell], float | None]:
    """The last value that a run has under a key of its metrics."""

    def read(run: Run, cell: Cell) -> float | None:
        values = [value for row in run.rows if (value := getattr(row, key)) is not None]
        return scale * values[-1] if values else None

    return read


def _rows_to_target(run: Run, cell: Cell) -> list[RoundRow] | None:
    assert cell.target is not None
    for place, row in enumerate(run.rows, 1):
        if row.accuracy is not None and row.accuracy >= cell.target:
            return run.rows[:place]
    return None


def _gigabytes(run: Run, cell: Cell) -> float | None:
    rows = _rows_to_target(run, cell)
    total = rows[-1].bytes_total if rows else None
    return None if total is None else total / 1e9


def _equilibrium(run: Run, cell: Cell) -> float | None:
    losses = [loss for _, loss in total_loss(run.rows)]
    for end in range(CALM_ROUNDS, len(losses) + 1):
        if pvariance(losses[end - CALM_ROUNDS : end]) < CALM_VARIANCE:
            return end
    return None


def _median_steps(run: Run, cell: Cell) -> float | None:
    steps = [row.supervised_steps for row in run.rows if row.supervised_steps is not None]
    return median(steps) if steps else None


def _last_share(run: Run, cell: Cell) -> float | None:
    shares = semi_faster_share(run.rows)
    return shares[-1][1] if shares else None


def _last_loss(run: Run, cell: Cell) -> float | None:
    losses = total_loss(run.rows)
    return losses[-1][1] if losses else None


# --- curves ---------------------------------------------------------------------------------------


def column(key: str) -> Callable[[Sequence[RoundRow]], Points]:
    def points(rows: Sequence[RoundRow]) -> Points:
        return [(row.round + 1, value) for row in rows if (value := getattr(row, key)) is not None]

    return points


def total_loss(rows: Sequence[RoundRow]) -> Points:
    return [
        (row.round + 1, row.loss_supervised + row.loss_semi)
        for row in rows
        if row.loss_supervised is not None and row.loss_semi is not None
    ]


def falls(key: str) -> Callable[[Sequence[RoundRow]], Points]:
    """How much less the mean loss of a period is than that of the one before it."""

    def points(rows: Sequence[RoundRow]) -> Points:
        values = column(key)(rows)
        means = [
            (values[end - 1][0], fmean(value for _, value in values[end - PERIOD : end]))
            for end in range(PERIOD, len(values) + 1, PERIOD)
        ]
        return [(now[0], before[1] - now[1]) for before, now in pairwise(means)]

    return points


def semi_faster_share(rows: Sequence[RoundRow]) -> Points:
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


CURVES: dict[str, tuple[str, Callable[[Sequence[RoundRow]], Points]]] = {
    "accuracy": ("test accuracy (%)", column("accuracy")),
    "loss_semi": ("semi-supervised loss", column("loss_semi")),
    "loss_supervised": ("supervised loss", column("loss_supervised")),
    "loss": ("sum of both losses", total_loss),
    "fall_supervised": ("Δf_s, supervised", falls("loss_supervised")),
    "fall_semi": ("Δf_u, semi-supervised", falls("loss_semi")),
    "semi_faster_share": ("R_h", semi_faster_share),
}
NEVER = "not reached"
MEASURES = {
    # Of a virtual clock; until there is one, every run lacks it.
    "hours": Measure("hours", lambda run, cell: None, missing="not timed"),
    "accuracy": Measure("test accuracy (%)", _last("accuracy")),
    "gigabytes": Measure("GB", _gigabytes, missing=NEVER),
    "mask_rate": Measure("mask rate (%)", _last("mask_rate", 100)),
    "impurity": Measure("impurity (%)", _last("impurity", 100)),
    "equilibrium": Measure("rounds", _equilibrium, digits=0, missing=NEVER),
    "supervised_steps": Measure("median K_s", _median_steps, digits=0),
    "loss_semi": Measure("loss", _last("loss_semi"), digits=3),
    "loss_supervised": Measure("loss", _last("loss_supervised"), digits=3),
    "loss": Measure("loss", _last_loss, digits=3),
    "semi_faster_share": Measure("R_h", _last_share, digits=2, missing="too few rounds"),
}


def rounded(value: float, digits: int) -> str:
    """Without a minus before nothing but zeros."""
    text = f"{value:.{digits}f}"
    return text.lstrip("-") if math.isclose(float(text), 0) else text
