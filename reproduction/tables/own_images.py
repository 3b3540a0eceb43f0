"""The runs that chose the preset ``images``, runs on image sets that had no part in the choice, and their tables."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from reproduction.records import VARIANTS, entries
from reproduction.tables.numbers import table
from semisfl.runs.report import Spread
from semisfl.settings import lookup
from semisfl.settings.plain_values import read as read_toml

TASKS = tuple(read_toml(VARIANTS / "images.toml"))
"""The names of all tasks in the order of the tables' columns; the file has their settings."""

# --- tables ------------------------------------------------------------------------------------------

Cells = dict[tuple[str, str], dict[str, list[dict[str, Any]]]]


def read(name: str) -> Cells:
    """Return the runs of a table by method and variant, then by task."""
    cells: Cells = defaultdict(lambda: defaultdict(list))
    for one in entries("images"):
        if one["table"] == name:
            cells[one["method"], one["variant"]][one["task"]].append(one)
    return cells


def validation(runs: Sequence[dict[str, Any]]) -> list[float]:
    return [run["validation"][-1] for run in runs]


def averaged(by_task: dict[str, list[dict[str, Any]]]) -> float:
    """Return the mean over tasks of the mean over seeds."""
    return fmean(fmean(validation(runs)) for runs in by_task.values())


def by_task(cells: Cells, value: Callable[[Sequence[dict[str, Any]]], list[float]]) -> str:
    tasks = [task for task in TASKS if any(task in one for one in cells.values())]
    rows = []
    for (method, variant), each in cells.items():
        spreads = [Spread.of(value(each[task])) for task in tasks]
        results = [
            f"{s.mean:.1f} ± {s.stderr:.1f}" if len(each[task]) > 1 else f"{s.mean:.1f}"
            for task, s in zip(tasks, spreads, strict=True)
        ]
        mean = fmean(spread.mean for spread in spreads)
        rows.append((mean, (lookup.title_of(method), f"`{variant}`", *results, f"{mean:.1f}")))
    rows.sort(key=lambda row: -row[0])  # best first
    return table(("", "variant", *tasks, "mean"), [row for _, row in rows])


def test(runs: Sequence[dict[str, Any]]) -> list[float]:
    return [run["test"] for run in runs]


def correction() -> str:
    """Return SemiSFL with each rule for correcting labels that was tried."""
    cells = read("correction")
    cells["semisfl", "clients"] = read("choice")["semisfl", "mixed"]
    return by_task(cells, validation)


def threshold() -> str:
    """Return both methods with thresholds of 0.6 and 0.8."""
    cells, chosen = read("threshold"), read("choice")
    for method in ("semisfl", "fedswitch-sl"):
        cells[method, "t8"] = chosen[method, "mixed"]
    return by_task(cells, validation)


def untuned_by_threshold() -> str:
    """Return every method on these sets: both split methods with each threshold, the others as they were run."""
    cells = {
        (method, variant if method == "supervised" else f"{variant}-{threshold}"): each
        for table, threshold in (("untuned", "t8"), ("untuned-t6", "t6"))
        for (method, variant), each in read(table).items()
    }
    return by_task(cells | read("untuned-full"), test)


def preset_as_it_is() -> str:
    """Return the preset's runs on these sets; labels alone, which no rule for clients changes, ran before."""
    labels_only = {key: each for key, each in read("untuned").items() if key[0] == "supervised"}
    return by_task(read("untuned-preset") | labels_only, test)


def tried(name: str) -> str:
    """Return the mean over all tasks of every variant of a table, best first."""
    cells = read(name)
    rows = [
        (
            lookup.title_of(method),
            f"`{variant}`",
            f"{averaged(each):.1f}",
            str(len(next(iter(each.values())))),
        )
        for (method, variant), each in sorted(cells.items(), key=lambda item: -averaged(item[1]))
    ]
    return table(("", "variant", "validation %", "seeds"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "images-choice": lambda: by_task(read("choice"), validation),
    "images-test": lambda: by_task(read("choice"), test),
    "images-correction": correction,
    "images-threshold": threshold,
    "images-two": lambda: by_task(read("two"), validation),
    "images-preset": preset_as_it_is,
    "images-untuned": untuned_by_threshold,
    "images-longer": lambda: by_task(read("longer"), validation),
    "images-parts": lambda: by_task(read("parts"), validation),
    "images-strong": lambda: tried("strong"),
    "images-mixed": lambda: tried("mixed"),
}
