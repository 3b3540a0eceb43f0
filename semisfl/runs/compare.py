"""List and run the jobs of a comparison: methods and seeds of `compare`, or missing cells of `reproduce`.

A run that an earlier call finished is not repeated. `run_in_turn` takes the jobs and a function that trains one.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from semisfl.runs.directory import RunDirectory
from semisfl.runs.grouping import Group, find_runs, group_runs, read_run
from semisfl.runs.preset_changes import flat
from semisfl.runs.report import Summary, summarise
from semisfl.runs.sweeps import PLAIN, Sweep, Variant, grid
from semisfl.settings import config as configs
from semisfl.settings import lookup
from semisfl.settings.config import Config, ConfigError
from semisfl.settings.plain_values import words_of

Status = Literal["new", "unfinished", "finished"]


@dataclass(frozen=True)
class Job:
    """One run of several."""

    config: Config
    path: Path
    status: Status
    label: str = ""
    """Its name in a table; empty: the settings that differ name it."""
    variant: str = ""
    """The name of its variant, if it has one."""

    @classmethod
    def of(cls, config: Config, path: Path, label: str = "", variant: str = "") -> "Job":
        return cls(config, path, _status(config, path), label, variant)

    def again(self) -> "Job":
        """Return the job with its present status: another process may have started or finished it."""
        return self.of(self.config, self.path, self.label, self.variant)

    @property
    def changed(self) -> list[str]:
        """Return the settings that replace those of an unfinished run: its limits."""
        limits = self.config.stop.model_dump()
        return [f"stop.{key}={'none' if limit is None else limit}" for key, limit in limits.items()]


def choose_methods(names: str) -> list[str]:
    """Return the methods that ``a,b`` or ``all`` names."""
    if names.strip() == "all":
        return list(lookup.METHODS.all())
    chosen = words_of(names)
    if not chosen:
        known = ", ".join(lookup.METHODS.names())
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
    """Return the runs of a comparison, seed by seed, so that a stopped one still compares equal seeds."""
    entries = {name: lookup.method(name) for name in methods}
    first = configs.parse(values, others=entries.values()).seed
    jobs = []
    for seed, cell, variant in itertools.product(
        range(first, first + seeds), grid(sweeps), variants
    ):
        changed = configs.override(values, [*variant.assignments, *cell.assignments])
        for method, entry in entries.items():
            config = configs.parse(
                {**changed, "method": method, "seed": seed}, others=entries.values()
            )
            # A method named ``package.module:Class`` gives its class alone.
            parts = (entry.name.rpartition(":")[2], variant.name, cell.name, f"seed{seed}")
            path = out / "-".join(part for part in parts if part)
            label = " ".join([entry.title, variant.name, *cell.assignments]) if variant.name else ""
            jobs.append(Job.of(config, path, label, variant.name))
    settings = [one for variant in variants for one in variant.assignments]
    named = [one.partition("=")[0].strip() for one in settings]
    _refuse_the_same_twice(jobs, [*(sweep.key for sweep in sweeps), *named])
    return jobs


def _refuse_the_same_twice(jobs: Sequence[Job], changed: Sequence[str]) -> None:
    """Raise `ConfigError` if two jobs are the same run (10 and 10.0), or two runs would share a directory.

    ``changed``: the settings that the jobs are to differ in.
    """
    seen: dict[str, Path] = {}
    paths: set[Path] = set()
    for job in jobs:
        other = seen.setdefault(job.config.model_dump_json(exclude={"sinks"}), job.path)
        if other is not job.path:
            _refuse_unread(job, changed)
            raise ConfigError(
                f"{other.name} and {job.path.name} would be the same run; "
                "give --sweep each value, and --variants each group of settings, once"
            )
        if job.path in paths:
            raise ConfigError(
                f"two runs would share the directory {job.path}; give each method, variant and value of "
                "--sweep its own name in letters, digits and . _ + -"
            )
        paths.add(job.path)


def _refuse_unread(job: Job, changed: Sequence[str]) -> None:
    known, method = configs.known_keys(type(job.config)), job.config.method
    if unread := [key for key in changed if key not in known]:
        raise ConfigError(f"{method} does not read {unread[0]}; leave {method} out of --methods")


def _status(config: Config, path: Path) -> Status:
    if not (path / "config.toml").is_file():
        return "new"
    there = RunDirectory.open(path).config()
    # Limits and sinks change nothing that a run computes, so it may continue with other ones.
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
    """Return the first setting that differs, with both values."""
    theirs, ours = flat(there.model_dump()), flat(here.model_dump())
    key = next(key for key in ours if theirs.get(key) != ours[key])
    return f"{key} = {theirs.get(key)} there, {ours[key]} here"


def run_in_turn(jobs: Sequence[Job], train: Callable[[Job], bool]) -> bool:
    """Run the jobs that are not finished; ``train`` returns whether a run reached its end. Return False if stopped."""
    left = (now for job in jobs if (now := job.again()).status != "finished")
    return all(train(job) for job in left)


def results(jobs: Sequence[Job], target: float | None = None) -> list[tuple[Group, Summary]]:
    """Return the groups of runs with their summaries, in the order of the jobs."""
    by_path = {job.path.resolve(): job for job in jobs}
    groups = []
    for group in group_runs(find_runs([job.path for job in jobs])):
        job = by_path[group.runs[0].path.resolve()]
        groups.append(replace(group, label=job.label or group.label, variant=job.variant))
    return [(group, summarise(group, target)) for group in groups]
