"""Compare the limits of ``stop`` with the metrics of a run. Loads no torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from pydantic import ValidationError

from semisfl.metrics import RoundMetrics
from semisfl.settings.counts import counted
from semisfl.settings.run import StopConfig


@dataclass(frozen=True)
class Standing:
    """The totals of a run that limits are compared with."""

    seconds: float = 0.0
    bytes: int = 0
    accuracy: float | None = None
    """Accuracy of the last test."""
    diverged: bool = False
    """Whether the round of the last test left the run diverged; its accuracy is no best and meets no target."""
    best: float | None = None
    without_better: int = 0
    """Consecutive tests without a new best accuracy."""

    @classmethod
    def after(cls, rounds: Iterable[RoundMetrics]) -> "Standing":
        """Return the totals after some rounds."""
        return reduce(Standing.then, rounds, cls())

    def then(self, metrics: RoundMetrics) -> "Standing":
        """Return the totals after one more round."""
        standing = replace(
            self,
            seconds=self.seconds + (metrics.seconds or 0.0),
            bytes=self.bytes if metrics.bytes_total is None else metrics.bytes_total,
        )
        if metrics.accuracy is None:
            return standing
        diverged = bool(metrics.diverged)
        better = not diverged and (self.best is None or metrics.accuracy > self.best)
        return replace(
            standing,
            accuracy=metrics.accuracy,
            diverged=diverged,
            best=metrics.accuracy if better else self.best,
            without_better=0 if better else self.without_better + 1,
        )


def limits_of(config: Mapping[str, Any]) -> StopConfig:
    """Return the limits of a run; none if a newer version wrote them, as what ends the run is unknown then."""
    try:
        return StopConfig.model_validate(config.get("stop", {}))
    except ValidationError:
        return StopConfig()


def met(stop: StopConfig, standing: Standing) -> str | None:
    """Return the key of the first limit that is met, or None."""
    now = {
        "target": None if standing.diverged else standing.accuracy,
        "patience": standing.without_better,
        "hours": standing.seconds / 3600,
        "gigabytes": standing.bytes / 1e9,
    }
    for key, value in now.items():
        limit = getattr(stop, key)
        if limit is not None and value is not None and value >= limit:
            return key
    return None


def reason(stop: StopConfig, key: str, standing: Standing) -> str:
    """Return a line that names a limit and the value that met it."""
    reached = {
        "target": f"accuracy {standing.accuracy or 0.0:.1f} %",
        "patience": f"{counted(standing.without_better, 'test')} without more than {standing.best or 0.0:.1f} %",
        "hours": f"{standing.seconds / 3600:.4g} h",
        "gigabytes": f"{standing.bytes / 1e9:.4g} GB",
    }
    return f"stop.{key} = {getattr(stop, key):g} is met ({reached[key]})"
