"""Read numbers from a run: one for a table, or a curve over its rounds."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from statistics import fmean, median, pvariance
from typing import TYPE_CHECKING

from reproduction import records
from reproduction.paper.grid import Cell
from semisfl.metrics import RoundMetrics
from semisfl.runs.report import Run, rounds_to
from semisfl.settings.config import parse

if TYPE_CHECKING:
    from semisfl.costs.clock import World
    from semisfl.costs.replay import Replay

PERIOD = 10
"""Rounds whose mean loss is one observation, as in the paper."""
FALLS = 10
"""R_h is the share of so many falls in which the semi-supervised loss fell more."""
CALM_ROUNDS, CALM_VARIANCE = 50, 0.01
"""The paper's equilibrium: the loss has less than this variance over so many successive rounds."""

UNKNOWN, NEVER = "not recorded", "not reached"

Points = list[tuple[float, float]]
Curve = Callable[[Sequence[RoundMetrics]], Points]


@dataclass(frozen=True)
class Measure:
    """One number that can be read from a run."""

    title: str
    of: Callable[[Run, Cell], float | str]
    """Returns the number, or the reason why a finished run has none."""
    digits: int = 1


def _until_target(cost: Callable[[Run], float | str]) -> Callable[[Run, Cell], float | str]:
    """Return a reader of what the rounds took until a cell's target was reached; all rounds if it has none."""

    def read(run: Run, cell: Cell) -> float | str:
        rounds = run.rounds if cell.target is None else rounds_to(run, cell.target)
        return NEVER if rounds is None else cost(replace(run, rounds=rounds))

    return read


def _gigabytes(run: Run) -> float | str:
    total = run.rounds[-1].bytes_total
    return UNKNOWN if total is None else total / 1e9


def _hours(run: Run) -> float | str:
    """Return the virtual hours with the paper's connections and with devices like the paper's."""
    try:
        return sum(replayed(run).seconds) / 3600
    except ValueError:  # the run does not record its bytes, or the shape of its images is unknown
        return "not timed"


def replayed(run: Run, world: "World | None" = None, codec: str | None = None) -> "Replay":
    """Return a run over the connections of ``world``, by default the paper's; raise ValueError if it lacks its bytes.

    Settings of a record that today's version does not have are left out.
    """
    from semisfl.costs.replay import replay  # loads torch, which only this needs
    from semisfl.costs.rounds import images_of_run

    if not records.exists(run.path.as_posix()):
        return replay(run, world or paper_world(), codec)
    one = records.entry(run.path.as_posix())
    values = records.known_today(one["settings"])
    clients = one.get("holdings", {}).get("clients", [])
    each = {client: sum(counts) for client, counts in enumerate(clients)}
    images = images_of_run(parse(values), one.get("images"), each)
    return replay(replace(run, config=values), world or paper_world(), codec, images)


@cache
def paper_world() -> "World":
    """Return the paper's connection speeds, with the assumed latency and devices."""
    from semisfl.costs import LATENCY, PAPER_DOWN, PAPER_UP, PROFILE
    from semisfl.costs.clock import World

    return World.of(PAPER_UP, PAPER_DOWN, LATENCY, PROFILE)


def _equilibrium(run: Run, cell: Cell) -> float | str:
    losses = [loss for _, loss in total_loss(run.rounds)]
    for end in range(CALM_ROUNDS, len(losses) + 1):
        if pvariance(losses[end - CALM_ROUNDS : end]) < CALM_VARIANCE:
            return end
    return NEVER


def _median_steps(run: Run, cell: Cell) -> float | str:
    steps = [value for _, value in column("supervised_steps")(run.rounds)]
    return median(steps) if steps else UNKNOWN


# --- curves ---------------------------------------------------------------------------------------


def column(key: str) -> Curve:
    """Return a reader of one metric over the rounds that have it."""

    def points(rounds: Sequence[RoundMetrics]) -> Points:
        return [
            (one.round + 1, value) for one in rounds if (value := getattr(one, key)) is not None
        ]

    return points


def total_loss(rounds: Sequence[RoundMetrics]) -> Points:
    """Return the sum of both losses over the rounds that have them."""
    return [
        (one.round + 1, one.loss_supervised + one.loss_semi)
        for one in rounds
        if one.loss_supervised is not None and one.loss_semi is not None
    ]


def falls(key: str) -> Curve:
    """Return a reader of how far the mean loss falls from each period to the next."""

    def points(rounds: Sequence[RoundMetrics]) -> Points:
        values = column(key)(rounds)
        means = [
            (values[end - 1][0], fmean(value for _, value in values[end - PERIOD : end]))
            for end in range(PERIOD, len(values) + 1, PERIOD)
        ]
        return [(now[0], before[1] - now[1]) for before, now in pairwise(means)]

    return points


def semi_faster_share(rounds: Sequence[RoundMetrics]) -> Points:
    """Return R_h: the share of the last falls in which the semi-supervised loss fell more.

    Rounds without clients have one loss only: they are in no period.
    """
    both = [one for one in rounds if one.loss_supervised is not None and one.loss_semi is not None]
    semi, supervised = falls("loss_semi")(both), falls("loss_supervised")(both)
    faster = [
        (place, float(ours > theirs))
        for (place, ours), (_, theirs) in zip(semi, supervised, strict=True)
    ]
    return [
        (faster[end - 1][0], fmean(one for _, one in faster[end - FALLS : end]))
        for end in range(FALLS, len(faster) + 1)
    ]


def _last(
    curve: Curve, scale: float = 1.0, none: str = UNKNOWN
) -> Callable[[Run, Cell], float | str]:
    """Return a reader of the last value of a curve; ``none``: the reason if it has no point."""

    def read(run: Run, cell: Cell) -> float | str:
        points = curve(run.rounds)
        return scale * points[-1][1] if points else none

    return read


CURVES: dict[str, tuple[str, Curve]] = {
    "accuracy": ("test accuracy (%)", column("accuracy")),
    "loss_semi": ("semi-supervised loss", column("loss_semi")),
    "loss_supervised": ("supervised loss", column("loss_supervised")),
    "loss": ("sum of both losses", total_loss),
    "fall_supervised": ("Δf_s, supervised", falls("loss_supervised")),
    "fall_semi": ("Δf_u, semi-supervised", falls("loss_semi")),
    "semi_faster_share": ("R_h", semi_faster_share),
}
MEASURES = {
    "accuracy": Measure("test accuracy (%)", _last(column("accuracy"))),
    "hours": Measure("virtual hours", _until_target(_hours)),
    "gigabytes": Measure("GB", _until_target(_gigabytes)),
    "mask_rate": Measure("mask rate (%)", _last(column("mask_rate"), 100)),
    "impurity": Measure("impurity (%)", _last(column("impurity"), 100)),
    "equilibrium": Measure("rounds", _equilibrium, digits=0),
    "supervised_steps": Measure("median K_s", _median_steps, digits=0),
    "loss_semi": Measure("loss", _last(column("loss_semi")), digits=3),
    "loss_supervised": Measure("loss", _last(column("loss_supervised")), digits=3),
    "loss": Measure("loss", _last(total_loss), digits=3),
    "semi_faster_share": Measure("R_h", _last(semi_faster_share, none="too few rounds"), digits=2),
}


def rounded(value: float, digits: int) -> str:
    """Return the value with so many digits; a rounded zero has no minus sign."""
    text = f"{value:.{digits}f}"
    return text.lstrip("-") if math.isclose(float(text), 0) else text
