"""Train the missing runs of tables and figures, and write them beside the paper's values."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reproduction.benchmarks.rounds import seconds_per_round
from reproduction.paper import drawn, written
from reproduction.paper.exhibits import EXHIBITS, choose
from reproduction.paper.grid import Exhibit
from reproduction.paper.index import Missing, RunIndex, chosen, missing
from semisfl.cli import console, output, runner
from semisfl.cli.signals import StopSignals
from semisfl.engine.hardware import Hardware
from semisfl.files import write_whole
from semisfl.runs.compare import Job
from semisfl.runs.reading import read_rounds


@dataclass(frozen=True)
class Grid:
    """Tables and figures to make, the folder for their new runs, and the runs that lack."""

    exhibits: list[Exhibit]
    out: Path
    rounds: int | None
    """Rounds per run; None: each cell's own."""
    missing: list[Missing]

    @classmethod
    def of(
        cls,
        names: list[str],
        out: Path,
        only: Sequence[str] = (),
        rounds: int | None = None,
        seeds: int = 1,
        stand_ins: bool = False,
    ) -> "Grid":
        """Return the grid of named exhibits; runs are looked for in ``out`` and in the records.

        ``only`` chooses cells, as `index.chosen` describes; ``seeds`` counts runs per cell, with the
        seeds 0, 1, and so on. Raises ConfigError for an unknown name.
        """
        exhibits = choose(names)
        cells = chosen([cell for exhibit in exhibits for cell in exhibit.cells], only)
        left = missing(cells, RunIndex(out), rounds=rounds, seeds=seeds, stand_ins=stand_ins)
        return cls(exhibits, out, rounds, left)


def train(grid: Grid, *, jobs: int, engine: str | None, device: str, quiet: bool) -> bool:
    """Train the missing runs; return False if a signal stopped them. The same command continues."""
    work = [Job(one.config, one.path) for one in grid.missing]
    if not work:
        return True
    with StopSignals() as signals:
        done = runner.run_all(
            work, signals, engine=engine, at_once=jobs, device=device, quiet=quiet, share=True
        )
    if not done:
        print("stopped; the same command continues")
    return done


def write(grid: Grid) -> None:
    """Write ``NAME.md`` and pictures of each exhibit into the grid's folder, and print the tables."""
    grid.out.mkdir(parents=True, exist_ok=True)
    index, drawable = RunIndex(grid.out), importlib.util.find_spec("matplotlib") is not None
    for exhibit in grid.exhibits:
        parts = written.measured(exhibit, index, grid.rounds)
        pictures = drawn.draw(exhibit, parts, grid.out) if drawable else []
        text = written.text_of(exhibit, parts, pictures[0].name if pictures else None)
        file = grid.out / f"{exhibit.name}.md"
        write_whole(file, f"# {exhibit.heading}\n\n{text}".encode())
        print(f"# {exhibit.heading}\n\n{text}\nwritten: {', '.join(map(str, [file, *pictures]))}\n")
    trained = [index.one(one.config) for one in grid.missing]
    runner.leave_if_diverged([indexed.run.diverged for indexed in trained if indexed])


def show_list(out: Path) -> None:
    """Print every table and figure with how many of its cells were run."""
    index = RunIndex(out)
    table = output.table("", ("name", "in the paper", "what", "cells", "measured"), text=3)
    for exhibit in EXHIBITS.values():
        done = sum(index.result(cell).rounds is not None for cell in exhibit.cells)
        counts = (str(len(exhibit.cells)), str(done))
        table.add_row(exhibit.name, exhibit.label, exhibit.title, *counts)
    output.show(table)


def show_estimate(runs: Sequence[Missing], device: str) -> float:
    """Time a round of each preset and method, print the time of all missing rounds, and return their seconds.

    Other settings of a cell do not change the estimate. Tests and start-up are not counted.
    """
    groups: dict[tuple[str, str], list[Missing]] = {}
    for one in runs:
        groups.setdefault((one.cell.preset, one.config.method), []).append(one)
    columns = ("preset", "method", "runs", "rounds left", "s per round", "time")
    table, total = output.table("", columns, text=2), 0.0
    for (preset, method), group in groups.items():
        per_round = seconds_per_round(preset, method, str(Hardware(device).device))
        left = sum(one.config.rounds - len(read_rounds(one.path, dict)) for one in group)
        total += left * per_round
        numbers = (str(len(group)), f"{left:,}", f"{per_round:.3g}")
        table.add_row(preset, method, *numbers, console.clock(left * per_round))
    output.show(table)
    print(f"about {console.clock(total)} one after another, tests and start-up not counted")
    return total
