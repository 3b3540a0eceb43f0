"""Read the files of a run directory. Loads nothing that trains."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from semisfl.files import open_file, parse_json, read_json
from semisfl.metrics.round_metrics import Damaged
from semisfl.settings.plain_values import read

Made = TypeVar("Made")
Values = dict[str, Any]

ENVIRONMENT, HOLDINGS, METRICS = "environment.json", "holdings.json", "metrics.jsonl"
KINDS = {
    str: (("method",), "name"),
    int: (("rounds", "seed"), "whole number"),
    dict: (("clients", "data", "fleet", "runtime", "server", "stop"), "section"),
}
"""The settings that are read without the rules of `semisfl.settings`, which may be of another version."""


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
    """Return the plain values of a run's configuration."""
    file = path / "config.toml"
    if not file.is_file():
        raise no_run(str(path))
    values = read(file)
    if missing := [key for key in ("method", "rounds") if key not in values]:
        raise ValueError(f"{file} is no run's configuration: it has no {missing[0]}")
    for kind, (keys, name) in KINDS.items():
        for key in keys:
            if key in values and not isinstance(values[key], kind):
                raise ValueError(f"{file} is damaged: {key} = {values[key]!r:.40} is no {name}")
    return values


def read_rounds(path: Path, make: Callable[[Values], Made]) -> list[Made]:
    """Return ``make`` of the metrics of each round; a last line that a crash cut off is left out."""
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
            values = parse_json(line, _no_number)
            if not isinstance(values, dict) or not isinstance(values.get("round"), int):
                raise ValueError("it does not hold the metrics of a round")
            rounds.append(make(values))
        except ValueError as error:
            if number < len(lines) or isinstance(error, Damaged):
                raise ValueError(
                    f"{path}, line {number} is damaged: {error}; remove the line"
                ) from error
    return rounds


def _no_number(name: str) -> None:
    raise Damaged(f"it holds {name}, which is no JSON number")


def read_holdings(path: Path) -> Values:
    """Return who held how many images of each class; empty if the run does not say."""
    return read_json(path / HOLDINGS)


def read_environment(path: Path) -> Values:
    """Return the versions and the machine that a run had; empty if the run does not say."""
    return read_json(path / ENVIRONMENT)


def read_images(path: Path) -> Values | None:
    """Return ``shape``, ``classes`` and ``unlabeled`` of a run's images; None if the run does not say."""
    described, keys = _description(path / "latest.safetensors"), ("shape", "classes", "unlabeled")
    return {key: described[key] for key in keys} if described.keys() >= set(keys) else None


def _description(checkpoint: Path) -> Values:
    """Return what a checkpoint says of its model, without reading its weights; empty if it does not say."""
    from safetensors import SafetensorError, safe_open

    try:
        open_file(checkpoint).close()
        with safe_open(checkpoint, framework="pt") as file:
            described = parse_json((file.metadata() or {}).get("state", "{}"), float)
    except (OSError, ValueError, SafetensorError):
        return {}
    for key in ("model", "description"):
        described = described.get(key) if isinstance(described, dict) else None
    return described if isinstance(described, dict) else {}
