"""Which runs a grid still lacks."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from semisfl.paper.grid import SETS, Cell
from semisfl.paper.identity import identity
from semisfl.paper.records import Records
from semisfl.paper.stand_ins import STAND_INS
from semisfl.settings.config import Config, ConfigError


class Missing(NamedTuple):
    """A run to be done, or to be continued."""

    cell: Cell
    config: Config
    path: Path


def chosen(cells: Iterable[Cell], only: Sequence[str]) -> list[Cell]:
    """The cells that each of ``only`` fits; one is several names with commas between, of which any may fit."""
    left = list(cells)
    for group in only:
        names = {name.strip().lower() for name in group.split(",")} - {""}
        known = {word for cell in left for word in _words(cell)}
        if unknown := sorted(names - known) or ([] if names else [group]):
            raise ConfigError(
                f"--only {unknown[0]!r} fits no cell; use some of {', '.join(sorted(known))}"
            )
        left = [cell for cell in left if names & _words(cell)]
    return left


def _words(cell: Cell) -> set[str]:
    """What a cell may be asked for by."""
    words = (cell.preset, SETS.get(cell.preset, ""), cell.method, cell.row, cell.column)
    return {word.lower() for word in (*words, *cell.changes) if word}


def missing(
    cells: Sequence[Cell],
    records: Records,
    *,
    rounds: int | None = None,
    seeds: int = 1,
    stand_ins: bool = False,
) -> list[Missing]:
    """Seed by seed, so that an early end still compares like with like; each run once."""
    found: dict[tuple[str, int, int], Missing] = {}
    for seed in range(seeds):
        for cell in cells:
            stand_in = STAND_INS.get(cell.preset) if stand_ins else None
            config = cell.config(rounds, seed, stand_in.changes if stand_in else ())
            key = (identity(config), config.rounds, seed)
            if key in found:
                continue
            record = records.one(config)
            if record is None:
                found[key] = Missing(cell, config, records.out / _name(cell, config, key[0]))
            elif not record.run.complete:
                # Continued as it was begun: what does not matter to its numbers may differ.
                config = record.config.model_copy(update={"stop": config.stop})
                found[key] = Missing(cell, config, record.path)
    return list(found.values())


def _name(cell: Cell, config: Config, digest: str) -> str:
    """Of a run's folder: for a person to read, and told from others by the digest."""
    preset = cell.preset.replace("+", "-")
    return f"{preset}-{config.method}-rounds{config.rounds}-seed{config.seed}-{digest}"
