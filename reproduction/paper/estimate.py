"""Estimate how long missing runs would take on this machine, from the seconds of a round."""

from collections.abc import Sequence

from reproduction.benchmarks.bench import seconds_per_round
from reproduction.paper.index import Missing
from semisfl.cli import console, output
from semisfl.engine.hardware import Hardware
from semisfl.runs.reading import read_rounds


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
