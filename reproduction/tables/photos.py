"""Runs over a frozen, pretrained bottom on eight sets of photographs, and their tables."""

from collections import defaultdict
from statistics import fmean

from reproduction.records import entries
from reproduction.tables.numbers import UNKNOWN, table
from semisfl.runs.report import Spread

COLUMNS = {
    "probe": "Linear probe",
    "supervised": "Supervised-only",
    "noclusters": "SemiSFL without clusters",
    "semisfl": "SemiSFL",
    "trained": "SemiSFL, bottoms trained",
    "random": "preset `images`, random weights",
}
Cells = dict[tuple[str, str, str], list[dict[str, list[float]]]]


def read() -> Cells:
    """Return the metrics of the runs by set, labels per class and column; a validation run counts as a column too."""
    cells: Cells = defaultdict(list)
    for one in entries("photos"):
        first, second, third, *_ = one["name"].split("-")
        cells[first, second, third].append(one["metrics"])
    return cells


def evidence(labels: str) -> str:
    """Return test accuracy after the last round by set and column, with so many labels per class, and bytes and seconds."""
    cells = read()
    sets = sorted({one for one, per_class, _ in cells if per_class == labels})
    columns = {name: title for name, title in COLUMNS.items() if (sets[0], labels, name) in cells}

    def shown(values: list[float]) -> str:
        spread = Spread.of(values)
        if len(values) == 1:
            return f"{spread.mean:.1f} (1 seed)"
        few = "" if len(values) == 3 else f" ({len(values)} seeds)"
        return f"{spread.mean:.1f} ± {spread.stderr:.1f}{few}"

    def last(one: str, column: str, key: str) -> list[float]:
        return [metrics[key][-1] for metrics in cells[one, labels, column]]

    rows = [[one, *(shown(last(one, c, "test_accuracy")) for c in columns)] for one in sets]
    for title, key, unit, form in (
        ("**mean**", "test_accuracy", 1, "**{:.1f}**"),
        ("GB sent", "bytes_total", 1e9, "{:.3g}"),
    ):
        means = [fmean(fmean(last(one, c, key)) for one in sets) / unit for c in columns]
        rows.append([title, *(form.format(mean) for mean in means)])
    return table(("", *columns.values()), rows)


def choice() -> str:
    """Return validation accuracy of every variant that was tried, by set, best first."""
    tried: dict[str, dict[str, float]] = defaultdict(dict)
    for (kind, one, variant), metrics in read().items():
        if kind == "choice":
            tried[variant][one] = metrics[0]["accuracy"][-1]
    sets = sorted(tried["base"])
    means = {name: fmean(by_set.values()) for name, by_set in tried.items()}
    rows = [
        [
            f"`{name}`",
            *(f"{by_set[one]:.1f}" if one in by_set else UNKNOWN for one in sets),
            f"{means[name]:.1f}" if len(by_set) == len(sets) else UNKNOWN,
        ]
        for name, by_set in sorted(tried.items(), key=lambda item: -means[item[0]])
    ]
    return table(("variant", *sets, "mean"), rows)


TABLES = {
    "photos-10": lambda: evidence("10"),
    "photos-5": lambda: evidence("5"),
    "photos-choice": choice,
}
