"""Estimate how long the missing runs would take on this machine, from `bench`'s seconds per round."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semisfl.files import write_whole
from semisfl.paper.missing import Missing
from semisfl.runs.reading import read_rounds
from semisfl.settings import presets
from semisfl.settings.config import ConfigError, parse

Speeds = dict[tuple[str, str], float]
"""Seconds per round by preset and method."""


@dataclass(frozen=True)
class Line:
    """The missing runs of one preset and method. Their other settings do not change the estimate."""

    preset: str
    method: str
    runs: int
    rounds: int
    """Rounds left to do, summed over the runs."""
    per_round: float

    @property
    def seconds(self) -> float:
        return self.rounds * self.per_round


def estimate(
    runs: Sequence[Missing],
    file: Path,
    *,
    measure: bool,
    device: str = "auto",
    say: Callable[[str], None] = lambda text: None,
) -> list[Line]:
    """Return one line per preset and method; with ``measure``, time what ``file`` lacks and add it there."""
    groups: dict[tuple[str, str], list[Missing]] = {}
    for one in runs:
        groups.setdefault((one.cell.preset, one.config.method), []).append(one)
    speeds = _read(file, must=not measure, device=device)
    if unknown := [key for key in groups if key not in speeds]:
        if not measure:
            names = ", ".join(f"{preset} {method}" for preset, method in unknown)
            raise ConfigError(
                f"{file} does not time {names}; leave --bench out to measure them now"
            )
        for key in unknown:
            say(f"timing {key[0]} {key[1]}")
            speeds[key] = _measured(*key, device)
            _write(file, speeds, device)
    lines = []
    for (preset, method), group in groups.items():
        left = sum(one.config.rounds - len(read_rounds(one.path, dict)) for one in group)
        lines.append(Line(preset, method, len(group), left, speeds[preset, method]))
    return lines


def _measured(preset: str, method: str, device: str) -> float:
    from semisfl.costs.bench import seconds_per_round
    from semisfl.engine.hardware import Hardware

    return seconds_per_round(preset, method, str(Hardware(device).device))


def _read(file: Path, must: bool, device: str) -> Speeds:
    if not file.is_file() and not must:
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        machine, timings = _machine(content["environment"]), content["rounds"]
        speeds = {
            (timing["preset"], timing["method"]): timing["seconds_a_round"]
            * _longer(timing, machine)
            for timing in timings
        }
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        lacking = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"{file} was not written by this version's `semisfl bench --json` ({lacking}); run it again"
        ) from error
    if machine != (this := _machine(_environment(device))):
        raise ConfigError(
            f"{file} was measured on {machine}, this machine has {this}; measure here: semisfl bench --json"
        )
    return speeds


def _longer(timing: dict[str, Any], machine: str) -> float:
    """Return how many times longer the paper's round is than the timed one, which may have fewer steps."""
    steps = parse(presets.values_of(timing["preset"])).clients.steps
    # A file without "steps" is of whole rounds, but only if a GPU was timed.
    return steps / timing["steps"] if "steps" in timing or "CPU" in machine else 1.0


def _write(file: Path, speeds: Speeds, device: str) -> None:
    timings = [
        {
            "preset": preset,
            "method": method,
            "seconds_a_round": seconds,
            "steps": parse(presets.values_of(preset)).clients.steps,
        }
        for (preset, method), seconds in speeds.items()
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {"environment": _environment(device), "rounds": timings}
    write_whole(file, json.dumps(content, indent=2).encode())


def _environment(device: str) -> dict[str, Any]:
    from semisfl.runs.environment import environment

    return environment(device)


def _machine(environment: dict[str, Any]) -> str:
    """Return the hardware that decides a round's time: the GPU, or the number of CPU cores."""
    return str(environment["gpu"] or f"{environment['cpus']} CPU cores")
