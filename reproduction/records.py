"""The records of measured runs: one compressed file per study, one JSON entry per line.

``records/NAME.jsonl.xz`` is the study NAME. An entry of a run has its ``name`` in the study, the
``semisfl`` version, all ``settings`` that its method reads, the ``environment``, where known the
``images`` and who held what (``holdings``), and ``metrics``: one list per metric, with one value per
round (null where a round lacks it). Other studies hold what a benchmark or an attack printed.

Settings are read as plain values. Only what plans or replays a run checks them against today's.
"""

import json
import lzma
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import tomlkit

from semisfl.files import write_whole
from semisfl.metrics import RoundMetrics
from semisfl.runs import reading
from semisfl.runs.report import Run
from semisfl.settings import config as configs
from semisfl.settings.plain_values import flatten, put

FOLDER = Path(__file__).parent / "records"
SUFFIX = ".jsonl.xz"
VARIANTS = Path(__file__).parent / "variants"
"""What `semisfl compare --variants` took for some studies."""
DIGITS = 5
"""Significant digits that a record keeps of a metric."""

Entry = dict[str, Any]


def studies() -> list[str]:
    """Return the names of all studies."""
    return sorted(file.name.removesuffix(SUFFIX) for file in FOLDER.glob(f"*{SUFFIX}"))


@cache
def entries(study: str) -> list[Entry]:
    """Return the entries of a study in their order. Callers must not change them."""
    with lzma.open(FOLDER / f"{study}{SUFFIX}", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@cache
def _by_name(study: str) -> dict[str, Entry]:
    return {entry["name"]: entry for entry in entries(study)}


def entry(path: str) -> Entry:
    """Return the entry ``STUDY/NAME``."""
    study, _, name = path.partition("/")
    return _by_name(study)[name]


def measured(path: str) -> Any:
    """Return what the benchmark ``STUDY/NAME`` printed."""
    return entry(path)["measured"]


def exists(path: str) -> bool:
    """Return whether the study of ``STUDY/NAME`` has that entry."""
    study, _, name = path.partition("/")
    return name in _by_name(study)


def run(path: str) -> Run:
    """Return the run ``STUDY/NAME`` with its rounds."""
    return run_of(path.partition("/")[0], entry(path))


@cache
def _rounds(study: str, name: str) -> list[RoundMetrics]:
    return [RoundMetrics.from_dict(one) for one in rounds_of(_by_name(study)[name])]


def run_of(study: str, one: Entry) -> Run:
    """Return the run of an entry; its path is ``STUDY/NAME``, which is no file."""
    return Run(Path(study, one["name"]), one["settings"], _rounds(study, one["name"]))


def rounds_of(one: Entry) -> list[dict[str, Any]]:
    """Return the metrics of each round of an entry, without those that the round lacks."""
    columns = one["metrics"]
    rows = zip(*columns.values(), strict=True)
    rounds = (dict(zip(columns, row, strict=True)) for row in rows)
    return [{key: one[key] for key in one if one[key] is not None} for one in rounds]


@cache
def defaults(method: str, aggregate: str) -> dict[str, Any]:
    """Return today's settings of a method and aggregation rule by dotted key, with None where there is no default."""
    config = configs.parse({"method": method, "robust": {"aggregate": aggregate}})
    values = flatten(config.model_dump(mode="json", exclude_none=True), lists=False)
    return {key: values.get(key) for key in configs.known_keys(config)}


def defaults_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `defaults` for the method and rule that a run's settings name."""
    return defaults(settings["method"], settings.get("robust", {}).get("aggregate", "mean"))


def known_today(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, nested, without those that today's version does not have."""
    values: dict[str, Any] = {}
    for key, value in flatten(settings, lists=False).items():
        if key in defaults_of(settings):
            put(values, key, value)
    return values


# --- writing ----------------------------------------------------------------------------------------


def record(run: Path, path: str, data: str = "") -> None:
    """Append a run directory to a study as ``STUDY/NAME``, without metrics per client and per class.

    ``data`` describes the images if they are not those of the data set that the settings name.
    Raises ValueError if the study has an entry of that name.
    """
    study, _, name = path.partition("/")
    before = entries(study) if study in studies() else []
    if not name or any(one.get("name") == name for one in before):
        raise ValueError(f"{path} is recorded already, or no STUDY/NAME; choose another name")
    config = configs.parse(reading.read_config(run))
    one = {
        "name": name,
        "semisfl": reading.read_environment(run).get("semisfl"),
        "settings": config.model_dump(mode="json", exclude_none=True, exclude={"sinks"}),
        "environment": _without_host(reading.read_environment(run)),
        "data": data,
        "images": reading.read_images(run),
        "holdings": reading.read_holdings(run),
        "metrics": {
            key: [_rounded(value) for value in column]
            for key, column in reading.columns(reading.read_rounds(run, dict)).items()
            if not any(isinstance(value, list | dict) for value in column)
        },
    }
    write(study, [*before, {key: value for key, value in one.items() if value}])


def write(study: str, every: list[Entry]) -> None:
    """Replace the entries of a study."""
    text = "".join(
        json.dumps(one, ensure_ascii=False, separators=(",", ":")) + "\n" for one in every
    )
    packed = lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)
    write_whole(FOLDER / f"{study}{SUFFIX}", packed)
    forget()


def forget() -> None:
    """Let every study be read again."""
    for reader in (entries, _by_name, _rounds):
        reader.cache_clear()


def unpack(path: str, folder: Path) -> Path:
    """Write the run ``STUDY/NAME`` as the run directory ``folder``, which `semisfl report` and others read."""
    one = entry(path)
    folder.mkdir(parents=True)
    files = {
        "config.toml": tomlkit.dumps(one["settings"]),
        reading.METRICS: "".join(json.dumps(row) + "\n" for row in rounds_of(one)),
        reading.ENVIRONMENT: json.dumps(one["environment"]),
        reading.HOLDINGS: json.dumps(one.get("holdings", {})),
    }
    for name, text in files.items():
        write_whole(folder / name, text.encode())
    return folder


def _rounded(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _without_host(environment: dict[str, Any]) -> dict[str, Any]:
    """Return the environment with system and processor alone: a kernel's version may name a machine's place."""
    text = str(environment.get("platform", ""))
    known = re.fullmatch(r"(\w+)-.*\b(x86_64|AMD64|aarch64|arm64)\b.*", text)
    return {**environment, "platform": f"{known[1]} {known[2]}" if known else text}
