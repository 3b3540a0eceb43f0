"""Find the runs that a grid still lacks."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from semisfl.paper.grid import SETS, Cell
from semisfl.paper.identity import identity
from semisfl.paper.run_index import RunIndex
from semisfl.paper.stand_ins import STAND_INS
from semisfl.settings.config import Config, ConfigError
from semisfl.settings.plain_values import words_of


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
            key = (identity(config), config.rounds, seed)
            if key in lacking:
                continue
            indexed = index.one(config)
            if indexed is None:
                lacking[key] = Missing(cell, config, index.out / _name(cell, config, key[0]))
            elif not indexed.run.complete:
                # A run continues with its own configuration, which may differ where its numbers do not.
                config = indexed.config.model_copy(update={"stop": config.stop})
                lacking[key] = Missing(cell, config, indexed.path)
    return list(lacking.values())


def _name(cell: Cell, config: Config, digest: str) -> str:
    """Return the name of a run's folder: readable, and unique by the digest."""
    preset = cell.preset.replace("+", "-")
    return f"{preset}-{config.method}-rounds{config.rounds}-seed{config.seed}-{digest}"
