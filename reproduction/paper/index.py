"""Find the runs of a cell among the records and in the folder of new runs, and the runs that still lack."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from reproduction import records
from reproduction.paper.grid import SETS, STAND_INS, Cell
from semisfl.runs import reading
from semisfl.runs.report import Run, read_run
from semisfl.settings.config import Config, ConfigError, parse
from semisfl.settings.plain_values import flatten, words_of

Values = Mapping[str, Any]

# The kind of fleet, the end of a run, its outputs and its speed are not meant to change its numbers.
# Seeds are averaged, and rounds are compared separately.
NO_MATTER = (
    *("seed", "rounds", "sinks", "stop.", "fleet.", "network.", "runtime.deterministic"),
    *("runtime.checkpoint_every", "runtime.evaluate_every", "runtime.best_by"),
)


def identity(settings: Values) -> str:
    """Return a digest of a run's settings: equal for runs that differ only in seed and number of rounds.

    Settings that today's version does not have do not count, and those that a run lacks have today's
    defaults: an old record stays readable without being checked.
    """
    given, defaults = flatten(settings, lists=False), records.defaults_of(settings)
    values = {key: given.get(key, default) for key, default in defaults.items()}
    if values["data.partition.kind"] != "dirichlet":
        values["data.partition.alpha"] = None
    if values["method"] == "supervised":  # only the server holds images
        values["data.partition.kind"] = values["data.partition.alpha"] = None
    matter = {key: value for key, value in values.items() if not key.startswith(NO_MATTER)}
    return hashlib.sha256(json.dumps(matter, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class IndexedRun:
    """A recorded run, or a run directory in the folder where runs are continued."""

    path: Path
    settings: Values
    load: Callable[[], Run]
    own: bool = False
    """Whether it is a run directory, which can be continued."""
    data: str = ""
    """The data that was used, if not the set that the settings name."""

    @property
    def rounds(self) -> int:
        """Return how many rounds the run has when it is complete."""
        return int(self.settings["rounds"])

    @property
    def seed(self) -> int:
        """Return the run's seed."""
        return int(self.settings.get("seed", 0))

    @cached_property
    def run(self) -> Run:
        """Return the run with its rounds, read when first asked for."""
        return self.load()


@dataclass(frozen=True)
class CellRuns:
    """The runs of a cell."""

    cell: Cell
    rounds: int | None = None
    """The number of rounds of the finished runs; None without one."""
    runs: tuple[IndexedRun, ...] = ()
    """Finished runs that differ in their seed alone."""
    data: str = ""
    """The data that was used, if not the paper's."""


class RunIndex:
    """The runs in the folder ``out``, where new ones go and unfinished ones are continued, and the records."""

    def __init__(self, out: Path | None = None, studies: Sequence[str] | None = None) -> None:
        self.out = out or Path()
        self._by_identity: dict[str, list[IndexedRun]] = {}
        # Runs in ``out`` come first, so that of two equal runs the new one is shown.
        for indexed in (*(_below(out) if out else ()), *_recorded(studies)):
            if ":" in indexed.settings["method"]:
                continue  # of another package: none of the paper's
            self._by_identity.setdefault(identity(indexed.settings), []).append(indexed)

    def of(self, config: Config) -> list[IndexedRun]:
        """Return the runs with this configuration, with any seed and any number of rounds."""
        return self._by_identity.get(_identity_of(config), [])

    def one(self, config: Config) -> IndexedRun | None:
        """Return the run with this configuration, rounds and seed, finished if possible, or None."""
        wanted = (config.rounds, config.seed)
        same = [one for one in self.of(config) if (one.rounds, one.seed) == wanted]
        finished = [one for one in same if one.run.complete]
        return next(iter([*finished, *(one for one in same if one.own)]), None)

    def result(self, cell: Cell, rounds: int | None = None) -> CellRuns:
        """Return the cell's finished runs with ``rounds`` or, if None, with the most rounds available.

        Runs on stand-in data are used if there are none on the paper's own data.
        """
        exact = self._finished(cell, (), rounds)
        stand_in = STAND_INS.get(cell.preset)
        if exact.rounds is not None or stand_in is None:
            return exact
        other = self._finished(cell, stand_in.changes, rounds)
        return replace(other, data=stand_in.called) if other.rounds is not None else exact

    def _finished(self, cell: Cell, more: Sequence[str], rounds: int | None) -> CellRuns:
        every = [one for one in self.of(cell.config(more=more)) if rounds in (None, one.rounds)]
        done = [one for one in every if one.run.complete and one.run.tested]
        if not done:
            return CellRuns(cell)
        # A run with more rounds than the cell's is another experiment, so it comes last.
        most = max((one.rounds for one in done), key=lambda n: (n <= cell.rounds, n))
        by_seed: dict[int, IndexedRun] = {}
        for one in done:
            if one.rounds == most:
                by_seed.setdefault(one.seed, one)
        chosen = tuple(by_seed[seed] for seed in sorted(by_seed))
        data = "; ".join(dict.fromkeys(one.data for one in chosen if one.data))
        return CellRuns(cell, most, chosen, data)


def _identity_of(config: Config) -> str:
    return identity(config.model_dump(mode="json", exclude_none=True))


def _recorded(studies: Sequence[str] | None) -> Iterator[IndexedRun]:
    for study in records.studies() if studies is None else studies:
        for one in records.entries(study):
            if "settings" in one and "metrics" in one:
                load = partial(records.run_of, study, one)
                path = Path(study, one["name"])
                yield IndexedRun(path, one["settings"], load, data=one.get("data", ""))


def _below(folder: Path) -> Iterator[IndexedRun]:
    for file in sorted(folder.rglob("config.toml")):
        path = file.parent
        yield IndexedRun(path, reading.read_config(path), partial(read_run, path), own=True)


# --- missing runs -----------------------------------------------------------------------------------


class Missing(NamedTuple):
    """A run to start or to continue."""

    cell: Cell
    config: Config
    path: Path


def chosen(cells: Iterable[Cell], only: Sequence[str]) -> list[Cell]:
    """Return the cells that match every group of ``only``.

    A group is names separated by commas; a cell matches it if one of them is a word of the cell.
    """
    left = list(cells)
    for group in only:
        names = set(words_of(group.lower()))
        known = {word for cell in left for word in _words(cell)}
        if unknown := sorted(names - known) or ([] if names else [group]):
            raise ConfigError(
                f"--only {unknown[0]!r} fits no cell; use some of {', '.join(sorted(known))}"
            )
        left = [cell for cell in left if names & _words(cell)]
    return left


def _words(cell: Cell) -> set[str]:
    """Return the words that select a cell: its preset, data set, method, row, column and changes."""
    words = (cell.preset, SETS.get(cell.preset, ""), cell.method, cell.row, cell.column)
    return {word.lower() for word in (*words, *cell.changes) if word}


def missing(
    cells: Sequence[Cell],
    index: RunIndex,
    *,
    rounds: int | None = None,
    seeds: int = 1,
    stand_ins: bool = False,
) -> list[Missing]:
    """Return every missing run once, ordered by seed, so that an early stop leaves comparable runs."""
    lacking: dict[tuple[str, int, int], Missing] = {}
    for seed in range(seeds):
        for cell in cells:
            stand_in = STAND_INS.get(cell.preset) if stand_ins else None
            config = cell.config(rounds, seed, stand_in.changes if stand_in else ())
            key = (_identity_of(config), config.rounds, seed)
            if key in lacking:
                continue
            indexed = index.one(config)
            if indexed is None:
                preset = cell.preset.replace("+", "-")
                name = f"{preset}-{config.method}-rounds{config.rounds}-seed{seed}-{key[0]}"
                lacking[key] = Missing(cell, config, index.out / name)
            elif not indexed.run.complete:
                # A run continues with its own settings, which may differ where its numbers do not.
                own = parse(indexed.settings).model_copy(update={"stop": config.stop})
                lacking[key] = Missing(cell, own, indexed.path)
    return list(lacking.values())
