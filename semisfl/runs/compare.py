"""List the runs of a comparison (methods, seeds, swept settings, variants) and sum up their results.

A run that an earlier call finished is not repeated. `semisfl.runs.pools` executes the runs.
"""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from semisfl.runs.directory import RunDirectory
from semisfl.runs.grouping import Group, find_runs, flatten, group_runs, read_run
from semisfl.runs.report import Summary, summarise
from semisfl.runs.start import PreparedRun, begin, go_on
from semisfl.settings import catalog, lookup
from semisfl.settings import config as configs
from semisfl.settings.config import Config, ConfigError
from semisfl.settings.plain_values import words_of

Status = Literal["new", "unfinished", "finished"]
NOT_SWEPT = {
    "method": "use --methods",
    "seed": "use --seeds",
    "sinks": "it changes nothing of what a run computes",
}


@dataclass(frozen=True)
class Sweep:
    """A setting and the values it takes, as text."""

    key: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Sweep":
        """Return the sweep that ``KEY=V1,V2,...`` describes."""
        key, _, values = text.partition("=")
        chosen = tuple(words_of(values))
        if not key.strip() or not chosen:
            raise ConfigError(
                f"--sweep {text!r} is not KEY=V1,V2,..., e.g. --sweep data.labeled=10,20,40"
            )
        if why := NOT_SWEPT.get(key.strip()):
            raise ConfigError(f"--sweep {text!r}: {key.strip()} cannot be swept; {why}")
        return cls(key.strip(), chosen)


@dataclass(frozen=True)
class Variant:
    """A named group of settings of `compare --variants`."""

    name: str = ""
    assignments: tuple[str, ...] = ()
    """``key=value`` each, as ``--set`` takes them."""


PLAIN = Variant()


def read_variants(path: Path) -> list[Variant]:
    """Read named variants from a TOML file: ``name = ["key=value", ...]``; ``[]`` is the preset as it is."""
    variants = []
    for name, settings in configs.read(path).items():
        listed = isinstance(settings, list) and all(isinstance(one, str) for one in settings)
        if not listed or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise ConfigError(
                f'{path}: {name} = {settings!r} is not NAME = ["key=value", ...] with a name of letters, digits, _ and -'
            )
        if fixed := {"method", "seed"} & {one.partition("=")[0].strip() for one in settings}:
            raise ConfigError(
                f"{path}: variant {name} sets {fixed.pop()}; use --methods and --seeds"
            )
        variants.append(Variant(name, tuple(settings)))
    if not variants:
        raise ConfigError(f'{path} names no variant, e.g. quick = ["rounds=10"]')
    return variants


@dataclass(frozen=True)
class Job:
    """One run of several."""

    config: Config
    path: Path
    status: Status
    name: str = ""
    """The name of its group in a table; empty: the title of its method."""
    differs: Mapping[str, str] = field(default_factory=dict)
    """The swept settings with this run's values; empty: nothing is swept."""

    @classmethod
    def of(
        cls, config: Config, path: Path, name: str = "", differs: Mapping[str, str] | None = None
    ) -> "Job":
        """Return the job of training ``config`` in the directory ``path``, which may hold part of the run already."""
        return cls(config, path, _status(config, path), name, differs or {})

    def again(self) -> "Job":
        """Return the job with its present status: another process may have started or finished it."""
        return self.of(self.config, self.path, self.name, self.differs)

    @property
    def changed(self) -> list[str]:
        """Return the settings that replace those of an unfinished run: its limits."""
        limits = self.config.stop.model_dump()
        return [f"stop.{key}={'none' if limit is None else limit}" for key, limit in limits.items()]

    def prepare(self, **arguments: Any) -> AbstractContextManager[PreparedRun]:
        """Start or continue the run; ``arguments`` are those of `semisfl.train`."""
        if self.status == "unfinished":
            return go_on(self.path, settings=self.changed, **arguments)
        return begin(self.config, out=self.path, **arguments)


def choose_methods(names: str) -> list[str]:
    """Return the methods that ``a,b`` or ``all`` names."""
    if names.strip() == "all":
        return list(catalog.METHODS)
    chosen = words_of(names)
    if not chosen:
        known = ", ".join(catalog.METHODS)
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
    if len({sweep.key for sweep in sweeps}) < len(sweeps):
        raise ConfigError("--sweep names a key twice; give all its values at once")
    entries = {name: lookup.method(name) for name in methods}
    first = configs.parse(values, others=entries.values()).seed
    cells = [
        dict(zip((sweep.key for sweep in sweeps), chosen, strict=True))
        for chosen in itertools.product(*(sweep.values for sweep in sweeps))
    ]
    jobs: list[Job] = []
    seen: dict[str, Path] = {}
    for seed, cell, variant in itertools.product(range(first, first + seeds), cells, variants):
        settings = [*variant.assignments, *(f"{key}={value}" for key, value in cell.items())]
        changed = configs.override(values, settings)
        place = "-".join(f"{key}-{value}" for key, value in cell.items())
        place = re.sub(r"[^A-Za-z0-9._+-]", "_", place)
        for method, entry in entries.items():
            config = configs.parse(
                {**changed, "method": method, "seed": seed}, others=entries.values()
            )
            # A method named ``package.module:Class`` gives its class alone.
            parts = (entry.name.rpartition(":")[2], variant.name, place, f"seed{seed}")
            path = out / "-".join(part for part in parts if part)
            other = seen.setdefault(config.model_dump_json(exclude={"sinks"}), path)
            if other is not path:
                known = configs.known_keys(config)
                keys = [setting.partition("=")[0].strip() for setting in settings]
                if unread := [key for key in keys if key not in known]:
                    raise ConfigError(
                        f"{method} does not read {unread[0]}; leave {method} out of --methods"
                    )
                raise ConfigError(
                    f"{other.name} and {path.name} would be the same run; give --sweep each value, and --variants "
                    "each group of settings, once"
                )
            jobs.append(Job.of(config, path, f"{entry.title} {variant.name}".strip(), cell))
    return jobs


def _status(config: Config, path: Path) -> Status:
    if not (path / "config.toml").is_file():
        return "new"
    there = RunDirectory.open(path).config()
    # Limits and sinks change nothing that a run computes, so it may continue with other ones.
    ours = {"stop": config.stop, "sinks": config.sinks}
    if there.model_copy(update=ours) != config:
        theirs, ours = flatten(there.model_dump()), flatten(config.model_dump())
        key = next(key for key in ours if theirs.get(key) != ours[key])
        raise ConfigError(
            f"{path} holds a run with other settings ({key} = {theirs.get(key)} there, {ours[key]} here); choose "
            "another --out"
        )
    run = read_run(path)
    done = run.complete or run.diverged or (run.finished and there.stop == config.stop)
    return "finished" if done else "unfinished"


def run_in_turn(jobs: Sequence[Job], train: Callable[[Job], bool]) -> bool:
    """Run the jobs that are not finished; ``train`` returns whether a run reached its end. Return False if stopped."""
    left = (now for job in jobs if (now := job.again()).status != "finished")
    return all(train(job) for job in left)


def results(jobs: Sequence[Job], target: float | None = None) -> list[tuple[Group, Summary]]:
    """Return the groups of runs with their summaries, in the order of the jobs.

    ``target``: an accuracy in percent; the summaries say what reaching it took.
    """
    by_path = {job.path.resolve(): job for job in jobs}
    groups = []
    for group in group_runs(find_runs([job.path for job in jobs])):
        job = by_path[group.runs[0].path.resolve()]
        groups.append(replace(group, name=job.name or group.name, differs=job.differs))
    return [(group, summarise(group, target)) for group in groups]
