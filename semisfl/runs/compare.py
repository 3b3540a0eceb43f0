"""Several runs, one table: `compare`'s methods and seeds, or the cells that `reproduce` lacks.

What an earlier call finished is not done again. `run_in_turn` is the one place where such runs are
executed: it is given the jobs, and a function that trains one of them.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from semisfl.runs.directory import RunDirectory
from semisfl.runs.grouping import Group, find_runs, group_runs, read_run
from semisfl.runs.report import Summary, summarise
from semisfl.runs.sweeps import Sweep, cells
from semisfl.runs.variants import PLAIN, Variant
from semisfl.settings import config as configs
from semisfl.settings import lookup
from semisfl.settings.config import Config, ConfigError

Status = Literal["new", "unfinished", "finished"]


@dataclass(frozen=True)
class Job:
    """One run of several."""

    config: Config
    path: Path
    status: Status
    label: str = ""
    """What a table calls it and its like; empty: by what tells their settings apart."""
    variant: str = ""
    """The group of settings it has, if these have names."""

    @classmethod
    def of(cls, config: Config, path: Path, label: str = "", variant: str = "") -> "Job":
        return cls(config, path, _status(config, path), label, variant)

    def again(self) -> "Job":
        """As it is now: another process may have begun or finished it."""
        return self.of(self.config, self.path, self.label, self.variant)

    @property
    def changed(self) -> list[str]:
        """Settings that an unfinished one goes on with, whatever it had."""
        limits = self.config.stop.model_dump()
        return [f"stop.{key}={'none' if limit is None else limit}" for key, limit in limits.items()]


def choose_methods(names: str) -> list[str]:
    """``a,b`` or ``all``."""
    if names.strip() == "all":
        return list(lookup.methods())
    chosen = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    if not chosen:
        known = ", ".join(lookup.method_names())
        raise ConfigError(f"--methods names no method; use all or some of {known}")
    for name in chosen:
        lookup.method(name)
    return chosen


def list_jobs(
    values: dict[str, Any],
    methods: Sequence[str],
    seeds: int,
    out: Path,
    sweeps: Sequence[Sweep] = (),
    variants: Sequence[Variant] = (PLAIN,),
) -> list[Job]:
    """The runs of a comparison, seed by seed so that an early end still compares like with like."""
    rows = {name: lookup.method(name) for name in methods}
    first = configs.parse(values, others=rows.values()).seed
    jobs = []
    for seed, cell, variant in itertools.product(
        range(first, first + seeds), cells(sweeps), variants
    ):
        changed = configs.override(values, [*variant.assignments, *cell.assignments])
        for method, row in rows.items():
            config = configs.parse(
                {**changed, "method": method, "seed": seed}, others=rows.values()
            )
            parts = (_as_file_name(row.name), variant.name, cell.file_name, f"seed{seed}")
            path = out / "-".join(part for part in parts if part)
            label = " ".join([row.title, variant.name, *cell.assignments]) if variant.name else ""
            jobs.append(Job.of(config, path, label, variant.name))
    _refuse_the_same_twice(jobs)
    return jobs


def _refuse_the_same_twice(jobs: Sequence[Job]) -> None:
    """Values that mean the same (10 and 10.0) would be counted as two seeds."""
    seen: dict[str, Path] = {}
    for job in jobs:
        other = seen.setdefault(job.config.model_dump_json(), job.path)
        if other is not job.path:
            raise ConfigError(
                f"{other.name} and {job.path.name} would be the same run; "
                "give --sweep each value, and --variants each group of settings, once"
            )


def _as_file_name(method: str) -> str:
    """A method without a row of its own is called ``package.module:Class``."""
    return method.rpartition(":")[2]


def _status(config: Config, path: Path) -> Status:
    if not (path / "config.toml").is_file():
        return "new"
    there = RunDirectory.open(path).config()
    # Limits and sinks change nothing of what a run computes: it goes on with others.
    ours = {"stop": config.stop, "sinks": config.sinks}
    if there.model_copy(update=ours) != config:
        raise ConfigError(
            f"{path} holds a run with other settings ({_difference(there, config)}); "
            "choose another --out"
        )
    run = read_run(path)
    done = run.complete or (run.finished and there.stop == config.stop)
    return "finished" if done else "unfinished"


def _difference(there: Config, here: Config) -> str:
    for key in configs.known_keys(type(here)):
        pair: list[Any] = [there, here]
        for name in key.split("."):
            pair = [getattr(section, name) for section in pair]
        if pair[0] != pair[1]:
            return f"{key} = {pair[0]} there, {pair[1]} here"
    raise AssertionError("the configurations are the same")


def run_in_turn(jobs: Sequence[Job], train: Callable[[Job], bool]) -> bool:
    """Do what is left; ``train`` says whether it got to the end. False: stopped."""
    left = (now for job in jobs if (now := job.again()).status != "finished")
    return all(train(job) for job in left)


def results(jobs: Sequence[Job], target: float | None = None) -> list[tuple[Group, Summary]]:
    """The runs of each method, summed up, in the order they were asked for."""
    by_path = {job.path.resolve(): job for job in jobs}
    groups = []
    for group in group_runs(find_runs([job.path for job in jobs])):
        job = by_path[group.runs[0].path.resolve()]
        groups.append(replace(group, label=job.label or group.label, variant=job.variant))
    return [(group, summarise(group, target)) for group in groups]
