"""A run as one text file: settings, environment, who held what and the metrics of every round.

A record holds all settings that its method reads, those of its preset too: presets and defaults may
change later, and the record still means the same run. `semisfl.runs.reading` reads it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from semisfl.files import write_whole
from semisfl.runs import reading
from semisfl.runs.preset_changes import flat, nearest_preset
from semisfl.runs.reading import FORMAT, SUFFIX
from semisfl.settings import config as configs
from semisfl.settings import lookup
from semisfl.settings.version import VERSION

DIGITS = 5
"""Significant digits that a record keeps of a metric."""


def write(run: Path, file: Path, brief: bool = False) -> None:
    """Write ``run``, a directory or a record, as the record ``file``, which must not be there yet.

    A ``brief`` record has no metrics per client and per class, which are most of a long run's size.
    """
    if not file.name.endswith(SUFFIX):
        better = str(file).removesuffix(".json") + SUFFIX
        raise ValueError(f"{file}: a record's name must end in {SUFFIX}; call it {better}")
    if file.exists():
        raise ValueError(f"{file} is already there; choose another name, or remove it first")
    recorded = reading.read_config(run)
    lookup.check_importable(recorded["method"], f"{run}")
    config = configs.parse(recorded)
    settings = flat(config.model_dump(mode="json", exclude_none=True))
    preset, changed = nearest_preset(settings)
    metrics = reading.columns(reading.read_rounds(run, dict))
    if brief:
        metrics = {key: values for key, values in metrics.items() if not _has_parts(values)}
    environment = reading.read_environment(run)
    if "platform" in environment:
        environment["platform"] = _kind_of_platform(environment["platform"])
    record = {
        "record": FORMAT,
        "semisfl": VERSION,
        "preset": preset,
        "settings": {key: settings[key] for key in changed},
        "as_in_preset": {key: settings[key] for key in settings if key not in changed},
        "environment": environment,
        "images": reading.read_images(run),
        "holdings": reading.read_holdings(run) or None,
        "metrics": _rounded(metrics),
    }
    write_whole(file, as_text({key: record[key] for key in record if record[key] is not None}))


def unpack(file: Path, folder: Path) -> Path:
    """Write a record as the run directory ``folder``, for what follows files, and return it."""
    import tomlkit

    folder.mkdir(parents=True)
    lines = [json.dumps(one) + "\n" for one in reading.read_rounds(file, dict)]
    write_whole(folder / "config.toml", tomlkit.dumps(reading.read_config(file)).encode())
    write_whole(folder / reading.METRICS, "".join(lines).encode())
    for name, values in (
        (reading.ENVIRONMENT, reading.read_environment(file)),
        (reading.HOLDINGS, reading.read_holdings(file)),
    ):
        if values:
            write_whole(folder / name, json.dumps(values).encode())
    return folder


def unpacked(paths: Sequence[Path], folder: Path) -> list[Path]:
    """Return ``paths`` with every record, also one in a named folder, unpacked below ``folder``."""
    inside = [run for path in paths for run in reading.runs_inside(path)]
    records = [path for path in (*paths, *inside) if reading.is_record(path)]
    for number, path in enumerate(records):
        unpack(path, folder / str(number) / reading.name_of(path))
    places = [folder / str(number) for number in range(len(records))]
    return [path for path in paths if path.is_dir()] + places


def as_text(record: Mapping[str, Any]) -> bytes:
    """Return JSON with one line per entry, and one per metric, so that two records can be compared."""
    lines = []
    for key, value in record.items():
        text = _line(value)
        if key == "metrics":
            columns = (f"  {json.dumps(name)}: {_line(column)}" for name, column in value.items())
            text = "{\n" + ",\n".join(columns) + "\n }"
        lines.append(f" {json.dumps(key)}: {text}")
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value


def _has_parts(values: Sequence[Any]) -> bool:
    return any(isinstance(value, list | dict) for value in values)


def _kind_of_platform(text: str) -> str:
    """Return system and processor: a kernel's version may name where a machine stands."""
    known = re.fullmatch(r"(\w+)-.*\b(x86_64|AMD64|aarch64|arm64)\b.*", text)
    return f"{known[1]} {known[2]}" if known else text
