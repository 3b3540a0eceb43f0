"""One way to read a run, whether it is a run directory or a record, which is one file.

Every function takes the path of either. `semisfl.runs.record` writes records. Loads nothing that trains.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from semisfl.files import open_file, parse_json, read_json
from semisfl.metrics.round_metrics import Damaged
from semisfl.settings.plain_values import put, read
from semisfl.settings.retired import modernised
from semisfl.settings.sections import ConfigError

Made = TypeVar("Made")
Values = dict[str, Any]

SUFFIX = ".run.json"
FORMAT = 1
ENVIRONMENT, HOLDINGS, METRICS = "environment.json", "holdings.json", "metrics.jsonl"
KINDS = {
    str: (("method",), "name"),
    int: (("rounds", "seed"), "whole number"),
    dict: (("clients", "data", "fleet", "runtime", "server", "stop"), "section"),
}
"""The settings that are read without the rules of `semisfl.settings`, which may be of another version."""


def is_record(path: Path) -> bool:
    """Return whether ``path`` is a record, by its name."""
    return path.name.endswith(SUFFIX) and path.is_file()


def holds_run(path: Path) -> bool:
    """Return whether ``path`` is a record or a run directory."""
    return is_record(path) or (path / "config.toml").is_file()


def runs_inside(folder: Path) -> list[Path]:
    """List the run directories and records directly inside a folder."""
    return sorted(path for path in folder.glob("*") if holds_run(path)) if folder.is_dir() else []


def no_run(places: str) -> ValueError:
    """Return the error for paths at which there is no run."""
    return ValueError(
        f"{places} holds no run (no config.toml or *{SUFFIX} in it or directly below it); "
        "name a run or a folder of runs"
    )


def name_of(path: Path) -> str:
    """Return a run's name: that of its directory, or of its record without the suffix."""
    return path.name.removesuffix(SUFFIX)


def read_config(path: Path) -> Values:
    """Return the plain values of a run's configuration."""
    if is_record(path):
        record = _record(path)
        file, values = path, _nested(record["as_in_preset"] | record["settings"], path)
    else:
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
    return modernised(values)


def read_rounds(path: Path, make: Callable[[Values], Made]) -> list[Made]:
    """Return ``make`` of the metrics of each round; a last line that a crash cut off is left out."""
    if not is_record(path):
        file = path / METRICS
        return parse_metrics(file.read_bytes().splitlines() if file.is_file() else [], file, make)
    lists = _record(path)["metrics"]
    rounds = [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
    try:
        return [make({key: one[key] for key in one if one[key] is not None}) for one in rounds]
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


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
    return (
        dict(_record(path).get("holdings", {})) if is_record(path) else read_json(path / HOLDINGS)
    )


def read_environment(path: Path) -> Values:
    """Return the versions and the machine that a run had; empty if the run does not say."""
    if is_record(path):
        return dict(_record(path)["environment"])
    return read_json(path / ENVIRONMENT)


def read_images(path: Path) -> Values | None:
    """Return ``shape``, ``classes`` and ``unlabeled`` of a run's images; None if the run does not say."""
    if is_record(path):
        return _record(path).get("images")
    described, keys = _description(path / "latest.safetensors"), ("shape", "classes", "unlabeled")
    return {key: described[key] for key in keys} if described.keys() >= set(keys) else None


def _record(path: Path) -> Values:
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(record, dict):
            raise ValueError("it does not hold the record of a run")
        if record["record"] > FORMAT:
            raise ValueError(
                f"its format {record['record']} is newer than {FORMAT}: update semisfl"
            )
        lengths = {len(column) for column in record["metrics"].values()}
        if len(lengths) > 1:
            raise ValueError("its metrics have different numbers of rounds")
        for key in ("settings", "as_in_preset", "environment"):
            record[key].keys()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    except KeyError as error:
        raise ValueError(f"{path} is no record of a run: it has no {error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return dict(record)


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


def _nested(flat: Mapping[str, Any], path: Path) -> Values:
    values: Values = {}
    try:
        for key, value in flat.items():
            put(values, key, value)
    except ConfigError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return values
