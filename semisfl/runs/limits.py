"""When a run has done enough: the limits of ``stop``, held against its rows. Loads no torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

from semisfl.metrics import RoundMetrics
from semisfl.settings.run import StopConfig


@dataclass(frozen=True)
class Standing:
    """What a run has come to, as far as a limit asks."""

    seconds: float = 0.0
    bytes: int = 0
    accuracy: float | None = None
    """Of the last test."""
    best: float | None = None
    without_better: int = 0
    """Tests in a row."""

    @classmethod
    def after(cls, rows: Iterable[RoundMetrics]) -> "Standing":
        return reduce(Standing.then, rows, cls())

    def then(self, row: RoundMetrics) -> "Standing":
        better = row.accuracy is not None and (self.best is None or row.accuracy > self.best)
        if row.accuracy is None:
            without_better = self.without_better
        else:
            without_better = 0 if better else self.without_better + 1
        return Standing(
            self.seconds + (row.seconds or 0.0),
            self.bytes if row.bytes_total is None else row.bytes_total,
            self.accuracy if row.accuracy is None else row.accuracy,
            row.accuracy if better else self.best,
            without_better,
        )


def met(stop: StopConfig, standing: Standing) -> str | None:
    """The key of the first limit that is met."""
    now = {
        "target": standing.accuracy,
        "patience": standing.without_better,
        "hours": standing.seconds / 3600,
        "gigabytes": standing.bytes / 1e9,
    }
    for key, value in now.items():
        limit = getattr(stop, key)
        if limit is not None and value is not None and value >= limit:
            return key
    return None


def told(stop: StopConfig, key: str, standing: Standing) -> str:
    """A limit that is met, with what met it."""
    reached = {
        "target": f"accuracy {standing.accuracy} %",
        "patience": f"{standing.without_better} tests without more than {standing.best} %",
        "hours": f"{standing.seconds / 3600:.4g} h",
        "gigabytes": f"{standing.bytes / 1e9:.4g} GB",
    }
    return f"stop.{key} = {getattr(stop, key):g} is met ({reached[key]})"
