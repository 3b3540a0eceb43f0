"""Count and draw who holds how many images of each class."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from semisfl.data.partition import Partition
from semisfl.files import save_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONGEST_NAME = 32
"""Letters of a class name that a picture shows."""


@dataclass(frozen=True)
class Holdings:
    """The number of images of each class that the server (first) and each client hold."""

    classes: list[str]
    counts: np.ndarray
    images: str = ""
    """A digest of the whole data set, which tells runs on other images apart; empty: the clients have their own."""
    names: tuple[str, ...] = ()
    """The folders of the clients; empty: they have numbers only."""

    def as_json(self) -> str:
        """Return the text of a run's holdings.json."""
        server, *clients = self.counts.tolist()
        values = {"classes": self.classes, "server": server, "clients": clients}
        more = {"images": self.images, "names": self.names}
        return json.dumps(values | {key: value for key, value in more.items() if value})


def count(partition: Partition, labels: np.ndarray, classes: Sequence[str]) -> Holdings:
    """Return how many images of each class every holder has.

    ``labels``: int64 [n] of all training images; -1 counts as a last class, ``unknown``. ``classes``: their names.
    """
    labels, unknown = np.asarray(labels), "unknown"
    while unknown in classes:
        unknown += " label"
    names = [*classes, *([unknown] if (labels < 0).any() else [])]
    held = [partition.labeled, *partition.clients]
    counts = [np.bincount(labels[one] % len(names), minlength=len(names)) for one in held]
    return Holdings(names, np.stack(counts), names=partition.names)


def draw(holdings: Holdings, path: Path) -> None:
    """Save the picture of who holds what to a file."""
    save_picture(picture(holdings), path)


def picture(holdings: Holdings) -> Figure:
    """Return a chart of who holds what: one column per holder, one line per class, area = images."""
    from matplotlib.figure import Figure  # slow to import, and only needed here

    rows, counts = list(map(shorten, holdings.classes)), holdings.counts.T
    holders = holdings.counts
    clients = holdings.names or map(str, range(len(holders) - 1))
    names = ["server", *map(shorten, clients)]
    # In inches: names need about 0.1 per letter; the grid takes the rest.
    names_width, names_height = (0.1 * max(map(len, some)) for some in (rows, names))
    grid_width = float(np.clip(1.5 + 0.3 * len(holders), 3.5, 15))
    height = float(np.clip(1.6 + 0.3 * len(rows), 2.9, 23.4))
    size = (names_width + grid_width + 1, height + names_height)
    figure = Figure(figsize=size, layout="constrained")
    totals, grid = figure.subplots(2, 1, sharex=True, height_ratios=[1, max(2, 0.3 * len(rows))])

    places = np.arange(len(holders)) + np.where(np.arange(len(holders)) > 0, 0.5, 0)
    colours = np.array(["tab:orange"] + ["tab:blue"] * (len(holders) - 1))
    totals.bar(places, counts.sum(axis=0), color=colours, width=0.7)
    totals.set_ylabel("images")
    totals.spines[["top", "right"]].set_visible(False)

    row, column = np.nonzero(counts)
    # The largest bubble fills its cell, whose side is 0.3 inch, or less with many holders or classes.
    side = 72 * min(0.3, (height - 1.4) / len(rows), grid_width / len(holders))
    area = (0.95 * side) ** 2 * counts[row, column] / max(counts.max(), 1)
    grid.scatter(places[column], row, s=np.maximum(area, 1), c=colours[column], linewidths=0)
    every = max(1, (len(holders) - 1) // 40)
    ticks = [0, *range(1, len(holders), every)]
    grid.set_xticks(places[ticks], [names[place] for place in ticks], rotation=90)
    grid.set_yticks(range(len(rows)), rows)
    grid.set_xlim(-0.7, places[-1] + 0.7)
    grid.set_ylim(len(rows) - 0.4, -0.6)
    # A label of the figure: the grid is narrower than these words if class names are long.
    by = "folder" if holdings.names else "number"
    figure.supxlabel(f"server's labels (orange) and clients by {by} (blue)", fontsize="medium")
    grid.grid(alpha=0.25)
    grid.set_axisbelow(True)
    return figure


def shorten(name: str, longest: int = LONGEST_NAME) -> str:
    """Return a name for a picture: at most ``longest`` letters, and without formulas, which dollar signs would begin."""
    cut = name if len(name) <= longest else name[: longest - 1] + "…"
    return cut.replace("$", r"\$")
