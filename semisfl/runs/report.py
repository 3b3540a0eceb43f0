"""What run directories say, as numbers. Imports nothing that trains."""

import json
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """What a run left behind."""

    path: Path
    config: dict[str, Any]
    rows: list[Row]

    @property
    def finished(self) -> bool:
        return bool(self.rows) and self.rows[-1]["round"] + 1 >= self.config["rounds"]


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seed."""

    label: str
    runs: list[Run]

    @property
    def method(self) -> str:
        return str(self.runs[0].config["method"])


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
    """What it took to reach a test accuracy: means over the runs that did."""

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
    rounds: int
    accuracy: Spread
    best: Spread
    bytes: float
    seconds: float
    to_target: ToTarget | None


def read_run(path: Path) -> Run:
    try:
        config = tomllib.loads((path / "config.toml").read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} holds no run: config.toml: {error.strerror or error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path / 'config.toml'} is damaged: {error}") from error
    return Run(path, config, _read_rows(path / "metrics.jsonl"))


def _read_rows(path: Path) -> list[Row]:
    rows = []
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):  # a last line may be cut off by a crash
                raise ValueError(f"{path}, line {number} is damaged: {error}") from error
    return rows


def find_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs at ``paths``; a directory that is no run stands for the runs directly inside it."""
    found: dict[Path, Run] = {}
    for path in paths:
        inside = [path] if (path / "config.toml").is_file() else _runs_inside(path)
        if not inside:
            raise ValueError(f"{path} holds no run (no config.toml in it or directly below it)")
        for place in inside:
            found.setdefault(place.resolve(), read_run(place))
    runs = [run for run in found.values() if any("accuracy" in row for row in run.rows)]
    if not runs:
        raise ValueError(
            f"no round was tested yet in {', '.join(str(run.path) for run in found.values())}; "
            "wait for a round or continue with `semisfl run --resume`"
        )
    return runs


def _runs_inside(path: Path) -> list[Path]:
    return sorted(file.parent for file in path.glob("*/config.toml")) if path.is_dir() else []


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Runs by configuration; each group is called by its method and what else tells it apart."""
    flat = [
        _flatten({key: item for key, item in run.config.items() if key != "seed"}) for run in runs
    ]
    groups: dict[str, list[int]] = {}
    for place, config in enumerate(flat):
        groups.setdefault(json.dumps(config, sort_keys=True), []).append(place)
    firsts = [flat[members[0]] for members in groups.values()]
    named = []
    for first, members in zip(firsts, groups.values(), strict=True):
        rivals = [other for other in firsts if other["method"] == first["method"]]
        keys = sorted({key for other in rivals for key in {*other, *first}})
        differing = [
            key for key in keys if any(other.get(key) != first.get(key) for other in rivals)
        ]
        label = " ".join(
            [first["method"], *(f"{key}={first.get(key, 'none')}" for key in differing)]
        )
        named.append(Group(label, [runs[place] for place in members]))
    return named


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def summarise(group: Group, target: float | None = None) -> Summary:
    tested = [[row["accuracy"] for row in run.rows if "accuracy" in row] for run in group.runs]
    return Summary(
        label=group.label,
        method=group.method,
        runs=[run.path for run in group.runs],
        rounds=min(len(run.rows) for run in group.runs),
        accuracy=Spread.of([accuracies[-1] for accuracies in tested]),
        best=Spread.of([max(accuracies) for accuracies in tested]),
        bytes=fmean(run.rows[-1].get("bytes_total", 0) for run in group.runs),
        seconds=fmean(sum(row["seconds"] for row in run.rows) for run in group.runs),
        to_target=_to_target(group, target) if target is not None else None,
    )


def _to_target(group: Group, target: float) -> ToTarget:
    costs = []
    for run in group.runs:
        seconds = 0.0
        for row in run.rows:
            seconds += row["seconds"]
            if row.get("accuracy", -math.inf) >= target:
                costs.append((row["round"] + 1, row.get("bytes_total", 0), seconds))
                break
    if not costs:
        return ToTarget(0, None, None, None)
    rounds, sent, seconds_ = (fmean(column) for column in zip(*costs, strict=True))
    return ToTarget(len(costs), rounds, sent, seconds_)


def as_json(summary: Summary) -> dict[str, Any]:
    to_target = summary.to_target
    return {
        "label": summary.label,
        "method": summary.method,
        "accuracy": vars(summary.accuracy),
        "best": vars(summary.best),
        "rounds": summary.rounds,
        "bytes": summary.bytes,
        "seconds": summary.seconds,
        "to_target": vars(to_target) if to_target is not None else None,
        "runs": [str(path) for path in summary.runs],
    }
