"""How long the missing runs would take on this machine, from seconds per round of `bench`."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semisfl.files import write_whole
from semisfl.paper.missing import Missing
from semisfl.runs.metrics_file import read_metrics
from semisfl.settings import presets
from semisfl.settings.config import ConfigError, parse

Speeds = dict[tuple[str, str], float]
"""Seconds per round by preset and method."""


@dataclass(frozen=True)
class Line:
    """The missing runs of one preset and method. Other settings of a run are not looked at."""

    preset: str
    method: str
    runs: int
    rounds: int
    """Left to do, of all of them."""
    per_round: float

    @property
    def seconds(self) -> float:
        return self.rounds * self.per_round


def estimate(
    left: Sequence[Missing],
    file: Path,
    *,
    measure: bool,
    device: str = "auto",
    say: Callable[[str], None] = lambda text: None,
) -> list[Line]:
    """By preset and method. What ``file`` does not say is measured and added to it if it may be."""
    groups: dict[tuple[str, str], list[Missing]] = {}
    for one in left:
        groups.setdefault((one.cell.preset, one.config.method), []).append(one)
    speeds = _read(file, must=not measure)
    if unknown := [key for key in groups if key not in speeds]:
        if not measure:
            names = ", ".join(f"{preset} {method}" for preset, method in unknown)
            raise ConfigError(
                f"{file} does not time {names}; leave --bench out, and they are measured now"
            )
        for key in unknown:
            say(f"timing {key[0]} {key[1]}")
            speeds[key] = _measured(*key, device)
            _write(file, speeds)
    return [
        Line(preset, method, len(group), sum(map(_rounds_left, group)), speeds[preset, method])
        for (preset, method), group in groups.items()
    ]


def _rounds_left(one: Missing) -> int:
    return one.config.rounds - len(read_metrics(one.path / "metrics.jsonl", dict))


def _measured(preset: str, method: str, device: str) -> float:
    from semisfl.costs.bench import seconds_per_round
    from semisfl.engine.hardware import Hardware

    return seconds_per_round(preset, method, str(Hardware(device).device))


def _read(file: Path, must: bool) -> Speeds:
    if not file.is_file() and not must:
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        here, rows = _machine(found["environment"]), found["rounds"]
        speeds = {
            (row["preset"], row["method"]): row["seconds_a_round"] * _longer(row, here)
            for row in rows
        }
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        lacking = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"{file} is no output of this version's `semisfl bench --json`: {lacking}"
        ) from error
    if here != (this := _machine(_environment())):
        raise ConfigError(
            f"{file} was measured on {here}, this machine has {this}; measure here: semisfl bench --json"
        )
    return speeds


def _longer(row: dict[str, Any], machine: str) -> float:
    """A round of the paper's against the one that was timed, which on a CPU may have fewer steps."""
    steps = parse(presets.values_of(row["preset"])).clients.steps
    # Files that do not say it yet are of whole rounds only where a GPU did them.
    return steps / row["steps"] if "steps" in row or "CPU" in machine else 1.0


def _write(file: Path, speeds: Speeds) -> None:
    rows = [
        {
            "preset": preset,
            "method": method,
            "seconds_a_round": seconds,
            "steps": parse(presets.values_of(preset)).clients.steps,
        }
        for (preset, method), seconds in speeds.items()
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {"environment": _environment(), "rounds": rows}
    write_whole(file, json.dumps(content, indent=2).encode())


def _environment() -> dict[str, Any]:
    from semisfl.runs.directory import environment

    return environment()


def _machine(environment: dict[str, Any]) -> str:
    """What a round's time depends on first of all."""
    return str(environment["gpu"] or f"{environment['cpus']} CPU cores")
