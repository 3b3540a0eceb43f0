"""Sum up groups of runs: accuracies, costs and what a target took. Imports nothing that trains."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from semisfl.metrics import RoundMetrics
from semisfl.runs.grouping import Group


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
    """What it took to reach an accuracy: means over the runs that did."""

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
    """Of which images ``accuracy`` and ``best`` are: ``test`` or ``validation``."""
    accuracy: Spread
    best: Spread
    test: Spread | None
    """On the test set after the last round; None: a run judged on validation images is not at its end."""
    bytes: float | None
    seconds: float | None
    """None: older files may not say."""
    to_target: ToTarget | None


def accuracy_of(kinds: Iterable[str]) -> str:
    """What to call an accuracy that is measured on these images."""
    known = set(kinds)
    return f"{known.pop()} accuracy" if len(known) == 1 else "accuracy"


def summarise(group: Group, target: float | None = None) -> Summary:
    tested = [
        [row.accuracy for row in run.rounds if row.accuracy is not None] for run in group.runs
    ]
    return Summary(
        label=group.label,
        method=group.method,
        runs=[run.path for run in group.runs],
        left_out=[run.path for run in group.left_out],
        remark=group.remark,
        rounds=max(run.rounds[-1].round + 1 for run in group.runs),
        judged_on=group.judged_on,
        accuracy=Spread.of([accuracies[-1] for accuracies in tested]),
        test=_at_the_end(group),
        best=Spread.of([max(accuracies) for accuracies in tested]),
        bytes=_mean([run.rounds[-1].bytes_total for run in group.runs]),
        seconds=_mean([_total_seconds(run.rounds) for run in group.runs]),
        to_target=_to_target(group, target) if target is not None else None,
    )


def _at_the_end(group: Group) -> Spread | None:
    last = [run.tested[-1] for run in group.runs]
    if group.judged_on == "test":
        found = [row.accuracy for row in last]
    else:
        found = [row.test_accuracy for row in last]
    known = [accuracy for accuracy in found if accuracy is not None]
    return Spread.of(known) if len(known) == len(last) else None


def _mean(values: Sequence[float | None]) -> float | None:
    """None if one of them is not known."""
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


def _total_seconds(rows: Sequence[RoundMetrics]) -> float | None:
    known = [row.seconds for row in rows if row.seconds is not None]
    return sum(known) if len(known) == len(rows) else None


def _to_target(group: Group, target: float) -> ToTarget:
    reached = []
    for run in group.runs:
        for place, row in enumerate(run.rounds, 1):
            if row.accuracy is not None and row.accuracy >= target:
                reached.append(run.rounds[:place])
                break
    if not reached:
        return ToTarget(0, None, None, None)
    return ToTarget(
        len(reached),
        fmean(rows[-1].round + 1 for rows in reached),
        _mean([rows[-1].bytes_total for rows in reached]),
        _mean([_total_seconds(rows) for rows in reached]),
    )


def as_json(summary: Summary) -> dict[str, Any]:
    to_target = summary.to_target
    return {
        "label": summary.label,
        "method": summary.method,
        "judged_on": summary.judged_on,
        "accuracy": vars(summary.accuracy),
        "best": vars(summary.best),
        "test": vars(summary.test) if summary.test is not None else None,
        "rounds": summary.rounds,
        "bytes": summary.bytes,
        "seconds": summary.seconds,
        "to_target": vars(to_target) if to_target is not None else None,
        "runs": [str(path) for path in summary.runs],
        "left_out": [str(path) for path in summary.left_out],
        "remark": summary.remark,
    }
