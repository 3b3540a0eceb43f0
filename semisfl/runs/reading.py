"""Read the files of a run directory, and compare the limits of ``stop`` with its metrics. Loads no torch."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

from semisfl.files import read_json
from semisfl.metrics import RoundMetrics
from semisfl.settings.counts import plural
from semisfl.settings.lookup import title_of
from semisfl.settings.plain_values import read
from semisfl.settings.run import StopConfig

Made = TypeVar("Made")
Values = dict[str, Any]

ENVIRONMENT, HOLDINGS, METRICS = "environment.json", "holdings.json", "metrics.jsonl"


def holds_run(path: Path) -> bool:
    """Return whether ``path`` is a run directory."""
    return (path / "config.toml").is_file()


def runs_inside(folder: Path) -> list[Path]:
    """List the run directories directly inside a folder."""
    return sorted(path for path in folder.glob("*") if holds_run(path)) if folder.is_dir() else []


def no_run(places: str) -> ValueError:
    """Return the error for paths at which there is no run."""
    return ValueError(
        f"{places} holds no run (no config.toml in it or directly below it); "
        "name a run or a folder of runs"
    )


def read_config(path: Path) -> Values:
    """Return the plain values of a run's configuration.

    They are not checked against the rules of today's settings: another version may have written them. Raises
    ValueError if there is no run.
    """
    file = path / "config.toml"
    if not file.is_file():
        raise no_run(str(path))
    values = read(file)
    if missing := [key for key in ("method", "rounds") if key not in values]:
        raise ValueError(f"{file} is no run's configuration: it has no {missing[0]}")
    return values


def read_rounds(path: Path, make: Callable[[Values], Made]) -> list[Made]:
    """Return ``make`` of the plain metrics of each round; a last line that a crash cut off is left out.

    ``make`` is `RoundMetrics.from_dict`, or ``dict`` for plain values. Raises ValueError with the number of a damaged
    line.
    """
    file = path / METRICS
    return parse_metrics(file.read_bytes().splitlines() if file.is_file() else [], file, make)


def columns(rounds: Sequence[Values]) -> dict[str, list[Any]]:
    """Return one list per key of the rounds, with None for a round that does not have it."""
    keys = dict.fromkeys(key for one in rounds for key in one if one[key] is not None)
    return {key: [one.get(key) for one in rounds] for key in keys}


def parse_metrics(lines: Sequence[bytes], path: Path, make: Callable[[Values], Made]) -> list[Made]:
    """Return what `read_rounds` does, from the ``lines`` of the metrics file at ``path``."""
    rounds = []
    for number, line in enumerate(lines, 1):
        try:
            rounds.append(make(json.loads(line)))
        except (ValueError, TypeError) as error:
            if number < len(lines):
                raise ValueError(
                    f"{path}, line {number} is damaged: {error}; remove the line"
                ) from error
    return rounds


def read_holdings(path: Path) -> Values:
    """Return who held how many images of each class; empty if the run does not say."""
    return read_json(path / HOLDINGS)


def read_environment(path: Path) -> Values:
    """Return the versions and the machine that a run had; empty if the run does not say."""
    return read_json(path / ENVIRONMENT)


def read_title(path: Path, method: str) -> str:
    """Return the title of a run's ``method``. The run has noted it: another package may not be installed here."""
    return str(read_environment(path).get("title") or title_of(method))


def read_images(path: Path) -> Values | None:
    """Return ``shape``, ``classes`` and ``unlabeled`` of a run's images; None if the run has no checkpoint."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path / "latest.safetensors", framework="pt") as file:
            described = json.loads(file.metadata()["state"])["model"]["description"]
        return {key: described[key] for key in ("shape", "classes", "unlabeled")}
    except (OSError, ValueError, LookupError, TypeError, SafetensorError):
        return None


# --- limits ----------------------------------------------------------------------------------------


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
    """Return the limits of a run."""
    return StopConfig.model_validate(config.get("stop", {}))


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
        "patience": f"{plural(standing.without_better, 'test')} without more than {standing.best or 0.0:.1f} %",
        "hours": f"{standing.seconds / 3600:.4g} h",
        "gigabytes": f"{standing.bytes / 1e9:.4g} GB",
    }
    return f"stop.{key} = {getattr(stop, key):g} is met ({reached[key]})"
