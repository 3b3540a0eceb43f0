"""Divide CIFAR-10 among clients. This needs no images, because every class has 5,000 of them."""

from dataclasses import dataclass
from statistics import median

import numpy as np

from reproduction.paper.grid import Cell
from semisfl.data.partition import split
from semisfl.settings.catalog import DATA

IMAGES_PER_CLASS = {"cifar10": 5000}
MOST = 0.9
"""`Holders.main_classes` counts the classes that make up this share of a client's images."""


@dataclass(frozen=True)
class Holders:
    """How many images of each class every client has."""

    counts: np.ndarray
    """[class, client]"""

    @property
    def sizes(self) -> list[int]:
        """Return the number of images of each client, the smallest first."""
        return sorted(self.counts.sum(0).tolist())

    @property
    def main_classes(self) -> float:
        """Return the median number of classes that make up 90 % of a client's images."""
        return median(map(_needed, self.counts.T))


def _needed(counts: np.ndarray) -> int:
    """Return how many of the largest classes make up 90 % of ``counts``."""
    largest_first = np.sort(counts)[::-1].cumsum()
    return int(np.searchsorted(largest_first, MOST * largest_first[-1])) + 1


def holders(cell: Cell) -> Holders:
    """Return the division of a cell's data among its clients, by seed 0.

    The number of images of each class is exact. Which image belongs to whom depends on the data's order.
    """
    config = cell.config(seed=0)
    kind = config.data.partition.kind
    assert kind != "folders" and kind != "own"
    classes = DATA[config.data.name].classes
    labels = np.repeat(np.arange(classes), IMAGES_PER_CLASS[config.data.name])
    partition = split(
        labels,
        labeled=config.data.labeled,
        clients=config.clients.total,
        kind=kind,
        alpha=config.data.partition.alpha,
        seed=config.seed,
        classes=classes,
    )
    counts = [np.bincount(labels[images], minlength=classes) for images in partition.clients]
    return Holders(np.stack(counts, axis=1))
