"""An index of the runs below some folders. It finds a cell's runs by their configuration."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from semisfl.paper.grid import Cell
from semisfl.paper.identity import identity
from semisfl.paper.stand_ins import STAND_INS
from semisfl.runs import reading
from semisfl.runs.grouping import Run, read_run
from semisfl.settings import config as configs
from semisfl.settings.config import Config, ConfigError

NOTES = "stand-ins.toml"
"""A file in a folder of runs. It says which data stood in for a data set there."""


@dataclass(frozen=True)
class IndexedRun:
    """A run directory or record file, with the configuration that identifies it."""

    path: Path
    config: Config
    own: bool
    """Whether it is in the folder where runs are continued; runs elsewhere are only read."""
    data: str = ""
    """The data that was used, if not the set of that name."""

    @cached_property
    def run(self) -> Run:
        """Return the run with its rounds; it is read when first asked for."""
        return read_run(self.path)


@dataclass(frozen=True)
class CellRuns:
    """The runs that an index has for a cell."""

    cell: Cell
    rounds: int | None = None
    """The number of rounds of the finished runs; None without one."""
    runs: tuple[IndexedRun, ...] = ()
    """Finished runs that differ in their seed alone."""
    data: str = ""
    """The data that was used, if not the paper's."""
    unfinished: tuple[IndexedRun, ...] = ()


class RunIndex:
    """The runs below some folders. New runs go to ``out``, and unfinished ones there are continued."""

    def __init__(self, out: Path, others: Sequence[Path] = ()) -> None:
        self.out = out
        self._by_identity: dict[str, list[IndexedRun]] = {}
        for folder in others:
            if not folder.is_dir():
                raise ConfigError(f"--from {folder} is no folder; name one that holds runs")
        # Runs in ``out`` come first, so that of two equal runs the new one is shown.
        for folder in dict.fromkeys(place.resolve() for place in (out, *others)):
            for indexed in _below(folder, own=folder == out.resolve()):
                self._by_identity.setdefault(identity(indexed.config), []).append(indexed)

    def of(self, config: Config) -> list[IndexedRun]:
        """Return the runs with this configuration, with any seed and any number of rounds."""
        return self._by_identity.get(identity(config), [])

    def one(self, config: Config) -> IndexedRun | None:
        """Return the run with this configuration, rounds and seed, finished if possible, or None."""
        same = [
            indexed
            for indexed in self.of(config)
            if (indexed.config.rounds, indexed.config.seed) == (config.rounds, config.seed)
        ]
        finished = [indexed for indexed in same if indexed.run.complete]
        return next(iter([*finished, *(indexed for indexed in same if indexed.own)]), None)

    def result(self, cell: Cell, rounds: int | None = None) -> CellRuns:
        """Return the cell's finished runs with ``rounds`` or, if None, with the most rounds available.

        Runs on stand-in data are used if there are none on the paper's own data.
        """
        exact = self._finished(cell, (), rounds)
        stand_in = STAND_INS.get(cell.preset)
        if exact.rounds is not None or stand_in is None:
            return exact
        other = self._finished(cell, stand_in.changes, rounds)
        data = stand_in.called if other.rounds is not None else ""
        return replace(other, data=data, unfinished=exact.unfinished + other.unfinished)

    def _finished(self, cell: Cell, more: Sequence[str], rounds: int | None) -> CellRuns:
        indexed_runs = self.of(cell.config(more=more))
        done = [indexed for indexed in indexed_runs if indexed.run.complete and indexed.run.tested]
        unfinished = tuple(indexed for indexed in indexed_runs if not indexed.run.complete)
        if rounds is not None:
            done = [indexed for indexed in done if indexed.config.rounds == rounds]
        if not done:
            return CellRuns(cell, unfinished=unfinished)
        # A run with more rounds than the cell's is another experiment, so it comes last.
        most = max((indexed.config.rounds for indexed in done), key=lambda n: (n <= cell.rounds, n))
        by_seed: dict[int, IndexedRun] = {}
        for indexed in done:
            if indexed.config.rounds == most:
                by_seed.setdefault(indexed.config.seed, indexed)
        chosen = tuple(by_seed[seed] for seed in sorted(by_seed))
        data = "; ".join(dict.fromkeys(indexed.data for indexed in chosen if indexed.data))
        return CellRuns(cell, most, chosen, data, unfinished)


def _below(folder: Path, own: bool) -> Iterator[IndexedRun]:
    for path in sorted(_runs(folder)):
        if path.is_dir() and not (path / reading.METRICS).is_file() and not own:
            continue  # a configuration file alone is no run
        try:
            values = reading.read_config(path)
            if ":" in str(values["method"]):
                continue  # of another package: none of the paper's
            config = configs.parse(values)
        except ValueError as error:
            raise ConfigError(
                f"{path} cannot be read as a run ({error}); correct it, or move it away"
            ) from error
        # Only a run directory has checkpoints, so a record file is never continued.
        data = _data_note(path, folder, config.data.name)
        yield IndexedRun(path, config, own and path.is_dir(), data)


def _runs(folder: Path) -> Iterator[Path]:
    """Yield run directories and record files, each once; symbolic links are followed."""
    seen: set[str] = set()
    for place, inside, files in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(place)) in seen:
            inside.clear()
            continue
        seen.add(real)
        if "config.toml" in files:
            yield Path(place)
        yield from (Path(place) / name for name in files if name.endswith(reading.SUFFIX))


def _data_note(run: Path, root: Path, name: str) -> str:
    """Return what the nearest stand-ins file above a run says about a data set, or an empty text."""
    for folder in (run, *run.parents):
        file = folder / NOTES
        if file.is_file():
            return str(configs.read(file).get(name, ""))
        if folder == root:
            break
    return ""
