"""Sum up groups of runs: accuracies, costs and what a target took. Imports nothing that trains."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from semisfl.metrics import RoundMetrics
from semisfl.runs.grouping import Group, Run
from semisfl.runs.limits import Standing


@dataclass(frozen=True)
class Spread:
    """A mean and its standard error; the error is None for a single value."""

    mean: float
    stderr: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        return cls(fmean(values), error)

    def __str__(self) -> str:
        return f"{self.mean:.1f}" + (f" ± {self.stderr:.1f}" if self.stderr is not None else "")


@dataclass(frozen=True)
class ToTarget:
    """The cost of reaching an accuracy: means over the runs that reached it."""

    reached: int
    rounds: float | None
    bytes: float | None
    seconds: float | None


@dataclass(frozen=True)
class Summary:
    """One line of a table."""

    label: str
    method: str
    runs: list[Path]
    left_out: list[Path]
    remark: str
    rounds: int
    judged_on: str
    """The images that ``accuracy`` and ``best`` are measured on: ``test`` or ``validation``."""
    accuracy: Spread
    best: Spread
    test: Spread | None
    """Accuracy on the test set after the last round; None if a run judged on validation images has not ended."""
    bytes: float | None
    seconds: float | None
    """None: a file of an older version does not have it."""
    to_target: ToTarget | None


def accuracy_of(kinds: Iterable[str]) -> str:
    """Return the name of an accuracy that is measured on these kinds of images."""
    known = set(kinds)
    return f"{known.pop()} accuracy" if len(known) == 1 else "accuracy"


def summarise(group: Group, target: float | None = None) -> Summary:
    """Return the means of a group; with ``target``, also the cost of reaching that accuracy."""
    return Summary(
        label=group.label,
        method=group.method,
        runs=[run.path for run in group.runs],
        left_out=[run.path for run in group.left_out],
        remark=group.remark,
        rounds=max(run.rounds[-1].round + 1 for run in group.runs),
        judged_on=group.judged_on,
        accuracy=Spread.of([run.accuracy for run in group.runs]),
        test=_at_the_end(group),
        best=Spread.of([Standing.after(run.rounds).best or 0.0 for run in group.runs]),
        bytes=_mean([run.rounds[-1].bytes_total for run in group.runs]),
        seconds=_mean([_total_seconds(run.rounds) for run in group.runs]),
        to_target=_to_target(group, target) if target is not None else None,
    )


def _at_the_end(group: Group) -> Spread | None:
    if group.judged_on == "test":
        return Spread.of([run.accuracy for run in group.runs])
    last = [run.tested[-1].test_accuracy for run in group.runs]
    known = [accuracy for accuracy in last if accuracy is not None]
    return Spread.of(known) if len(known) == len(last) else None


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean; None if one of the values is not known."""
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


def _total_seconds(rounds: Sequence[RoundMetrics]) -> float | None:
    known = [one.seconds for one in rounds if one.seconds is not None]
    return sum(known) if len(known) == len(rounds) else None


def rounds_to(run: Run, target: float) -> list[RoundMetrics] | None:
    """Return the rounds up to the first good one that reaches the accuracy ``target``, or None."""
    for count, metrics in enumerate(run.rounds, 1):
        there = metrics.accuracy is not None and metrics.accuracy >= target
        if there and not metrics.diverged:
            return run.rounds[:count]
    return None


def _to_target(group: Group, target: float) -> ToTarget:
    reached = [rounds for run in group.runs if (rounds := rounds_to(run, target)) is not None]
    if not reached:
        return ToTarget(0, None, None, None)
    return ToTarget(
        len(reached),
        fmean(rounds[-1].round + 1 for rounds in reached),
        _mean([rounds[-1].bytes_total for rounds in reached]),
        _mean([_total_seconds(rounds) for rounds in reached]),
    )


def as_json(summary: Summary) -> dict[str, Any]:
    """Return the summary as plain values."""
    paths = {"runs": summary.runs, "left_out": summary.left_out}
    return asdict(summary) | {key: [str(path) for path in value] for key, value in paths.items()}
