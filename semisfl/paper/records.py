"""The runs of a grid, found again by their configuration wherever they lie."""

import os
import tomllib
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
"""In a folder of runs: what a data set's name stood for there, where it is not that set itself."""


@dataclass(frozen=True)
class Record:
    """A run directory or record, and the configuration it is found by."""

    path: Path
    config: Config
    own: bool
    """Whether it lies where runs may be continued; others are only read."""
    data: str = ""
    """What its data set was, if not the one of that name."""

    @cached_property
    def run(self) -> Run:
        return read_run(self.path)


@dataclass(frozen=True)
class Result:
    """What there is for a cell."""

    cell: Cell
    rounds: int | None = None
    """Of the finished runs below; None: there is none."""
    records: tuple[Record, ...] = ()
    """Finished runs that differ in their seed alone."""
    data: str = ""
    """What the data was, if not the paper's."""
    unfinished: tuple[Record, ...] = ()


class Records:
    """The runs below some folders. ``out`` is where new ones go and unfinished ones are continued."""

    def __init__(self, out: Path, others: Sequence[Path] = ()) -> None:
        self.out = out
        self._by_identity: dict[str, list[Record]] = {}
        for folder in others:
            if not folder.is_dir():
                raise ConfigError(f"--from {folder} is no folder; give one that holds runs")
        # Own ones first: of two equal runs the one just made is shown, wherever others lie.
        for folder in dict.fromkeys(place.resolve() for place in (out, *others)):
            for record in _below(folder, own=folder == out.resolve()):
                self._by_identity.setdefault(identity(record.config), []).append(record)

    def of(self, config: Config) -> list[Record]:
        """Runs with this configuration, whatever their seed and number of rounds."""
        return self._by_identity.get(identity(config), [])

    def one(self, config: Config) -> Record | None:
        """The run with this configuration, rounds and seed: a finished one if there is any."""
        same = [
            record
            for record in self.of(config)
            if (record.config.rounds, record.config.seed) == (config.rounds, config.seed)
        ]
        finished = [record for record in same if record.run.complete]
        return next(iter([*finished, *(record for record in same if record.own)]), None)

    def result(self, cell: Cell, rounds: int | None = None) -> Result:
        """The cell's finished runs with ``rounds``, or if None with the most that any of them has.

        A stand-in's count where the paper's own data has none.
        """
        found = self._finished(cell, (), rounds)
        stand_in = STAND_INS.get(cell.preset)
        if found.rounds is not None or stand_in is None:
            return found
        other = self._finished(cell, stand_in.changes, rounds)
        data = stand_in.called if other.rounds is not None else ""
        return replace(other, data=data, unfinished=found.unfinished + other.unfinished)

    def _finished(self, cell: Cell, more: Sequence[str], rounds: int | None) -> Result:
        records = self.of(cell.config(more=more))
        done = [record for record in records if record.run.complete and record.run.tested]
        unfinished = tuple(record for record in records if not record.run.complete)
        if rounds is not None:
            done = [record for record in done if record.config.rounds == rounds]
        if not done:
            return Result(cell, unfinished=unfinished)
        # More rounds than the paper's are another experiment: its own number comes first.
        most = max((record.config.rounds for record in done), key=lambda n: (n <= cell.rounds, n))
        by_seed: dict[int, Record] = {}
        for record in done:
            if record.config.rounds == most:
                by_seed.setdefault(record.config.seed, record)
        chosen = tuple(by_seed[seed] for seed in sorted(by_seed))
        data = "; ".join(dict.fromkeys(record.data for record in chosen if record.data))
        return Result(cell, most, chosen, data, unfinished)


def _below(folder: Path, own: bool) -> Iterator[Record]:
    for path in sorted(_runs(folder)):
        if path.is_dir() and not (path / reading.METRICS).is_file() and not own:
            continue  # a configuration that somebody keeps, no run
        try:
            config = configs.parse(reading.read_config(path))
        except ValueError as error:
            raise ConfigError(
                f"{path} cannot be read as a run any more ({error}); correct it, or move it away"
            ) from error
        # A record is never continued: only a run directory has checkpoints.
        data = _data_note(path, folder, config.data.name)
        yield Record(path, config, own and path.is_dir(), data)


def _runs(folder: Path) -> Iterator[Path]:
    """Yield run directories and records, also in folders that are only linked to, each once."""
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
    """What the nearest note above a run says of a data set."""
    for folder in (run, *run.parents):
        file = folder / NOTES
        if file.is_file():
            try:
                return str(tomllib.loads(file.read_text(encoding="utf-8")).get(name, ""))
            except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
                raise ConfigError(f"{file} is not TOML: {error}") from error
        if folder == root:
            break
    return ""
