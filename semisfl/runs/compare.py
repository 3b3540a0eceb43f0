"""Several methods, several seeds, one table. What an earlier call finished is not done again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from semisfl import config as configs
from semisfl.config import Config, ConfigError
from semisfl.methods import METHODS
from semisfl.runs.report import Group, Summary, find_runs, group_runs, read_run, summarise

Status = Literal["new", "unfinished", "finished"]


@dataclass(frozen=True)
class Job:
    """One run of a comparison."""

    config: Config
    path: Path
    status: Status


def choose_methods(names: str) -> list[str]:
    """``a,b`` or ``all``."""
    if names.strip() == "all":
        return list(METHODS)
    chosen = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    if unknown := [name for name in chosen if name not in METHODS]:
        raise ConfigError(
            f"--methods: {unknown[0]!r} is not known; use all or some of {', '.join(METHODS)}"
        )
    if not chosen:
        raise ConfigError(f"--methods names no method; use all or some of {', '.join(METHODS)}")
    return chosen


def list_jobs(values: dict[str, Any], methods: Sequence[str], seeds: int, out: Path) -> list[Job]:
    """The runs of a comparison, seed by seed so that an early end still compares like with like."""
    first = configs.parse(values).seed
    jobs = []
    for seed in range(first, first + seeds):
        for method in methods:
            config = configs.parse({**values, "method": method, "seed": seed})
            path = out / f"{method}-seed{seed}"
            jobs.append(Job(config, path, _status(config, path)))
    return jobs


def _status(config: Config, path: Path) -> Status:
    if not (path / "config.toml").is_file():
        return "new"
    there = configs.parse(configs.read(path / "config.toml"))
    if there != config:
        raise ConfigError(
            f"{path} holds a run with other settings ({_difference(there, config)}); "
            "choose another --out"
        )
    return "finished" if read_run(path).finished else "unfinished"


def _difference(there: Config, here: Config) -> str:
    for key in configs.known_keys():
        pair: list[Any] = [there, here]
        for name in key.split("."):
            pair = [getattr(section, name) for section in pair]
        if pair[0] != pair[1]:
            return f"{key} = {pair[0]} there, {pair[1]} here"
    raise AssertionError("the configurations are the same")


def carry_out(jobs: Sequence[Job], train: Callable[[Job], bool]) -> bool:
    """Do what is left; ``train`` says whether it got to the end. False: stopped."""
    return all(train(job) for job in jobs if job.status != "finished")


def results(jobs: Sequence[Job], target: float | None = None) -> list[tuple[Group, Summary]]:
    """The runs of each method, summed up, in the order they were asked for."""
    groups = group_runs(find_runs([job.path for job in jobs]))
    return [(group, summarise(group, target)) for group in groups]
