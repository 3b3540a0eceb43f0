"""Compare groups of runs seed by seed. Imports nothing that trains."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any

from semisfl.runs.grouping import Group

QUANTILES = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
"""The 97.5 % quantile of Student's t for 1, 2, ... degrees of freedom."""


@dataclass(frozen=True)
class Difference:
    """The accuracy of ``first`` minus that of ``second``, over the seeds that both have."""

    first: str
    second: str
    seeds: int
    mean: float
    half_width: float | None
    """Half of the 95 % interval of the mean; None for a single seed."""
    wins: int
    """Seeds with which ``first`` is better."""
    judged_on: str
    """The images of these accuracies: ``test``, or ``validation`` if a run has not read the test images yet."""

    @property
    def interval(self) -> tuple[float, float] | None:
        if self.half_width is None:
            return None
        return self.mean - self.half_width, self.mean + self.half_width

    def as_json(self) -> dict[str, Any]:
        return {
            **{"first": self.first, "second": self.second, "seeds": self.seeds},
            **{"mean": self.mean, "interval": self.interval, "wins": self.wins},
            "judged_on": self.judged_on,
        }


def differences(groups: Sequence[Group]) -> list[Difference]:
    """Return the difference of every two groups that share a seed and are judged on the same images.

    A group without a finished run is compared only with groups that got as far.
    """
    pairs = []
    for first, second in combinations(groups, 2):
        finished = first.finished and second.finished
        if _images(first) != _images(second) or not (finished or _far(first) == _far(second)):
            continue
        last = [run.tested[-1] for run in (*first.runs, *second.runs)]
        on_test = all(metrics.test_accuracy is not None for metrics in last)
        one, other = _by_seed(first, on_test), _by_seed(second, on_test)
        if shared := [seed for seed in one if seed in other]:
            values = [one[seed] - other[seed] for seed in shared]
            kind = "test" if on_test else first.judged_on
            pairs.append(_difference(first.label, second.label, values, kind))
    return pairs


def _images(group: Group) -> tuple[str, str]:
    """Return what a group is judged on: the kind of images, and the data set by name, wherever it lies."""
    return group.judged_on, Path(group.runs[0].config.get("data", {}).get("name", "")).name


def _far(group: Group) -> int:
    return max(run.tested[-1].round for run in group.runs)


def _difference(first: str, second: str, values: Sequence[float], judged_on: str) -> Difference:
    count, wins = len(values), sum(value > 0 for value in values)
    half = quantile(count - 1) * stdev(values) / math.sqrt(count) if count > 1 else None
    return Difference(first, second, count, fmean(values), half, wins, judged_on)


def _by_seed(group: Group, on_test: bool) -> dict[object, float]:
    """Return the accuracy of the last test by seed; ``on_test``: that on the test set, not on validation images."""
    values = {}
    for run in group.runs:
        last = run.tested[-1]
        value = last.test_accuracy if on_test else last.accuracy
        assert value is not None
        values[run.config.get("seed", 0)] = value
    return values


def quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t: from the table, or by its expansion around the normal one."""
    if freedom <= len(QUANTILES):
        return QUANTILES[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))
