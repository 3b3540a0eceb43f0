"""Divide CIFAR-10 among clients. This needs no images, because every class has 5,000 of them."""

from dataclasses import dataclass
from statistics import median

import numpy as np

from semisfl.data.partition import Partition, split
from semisfl.paper.grid import Cell
from semisfl.settings.catalog import DATA

IMAGES_PER_CLASS = {"cifar10": 5000}
MOST = 0.9
"""`Holders.main_classes` counts the classes that make up this share of a client's images."""


@dataclass(frozen=True)
class Holders:
    """A partition, the label of every image, and the names of the classes."""

    partition: Partition
    labels: np.ndarray
    classes: tuple[str, ...]

    @property
    def sizes(self) -> list[int]:
        """Return the number of images of each client, the smallest first."""
        return sorted(len(images) for images in self.partition.clients)

    @property
    def main_classes(self) -> float:
        """Return the median number of classes that make up 90 % of a client's images."""
        return median(
            _needed(np.bincount(self.labels[images], minlength=len(self.classes)))
            for images in self.partition.clients
        )


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
    return Holders(partition, labels, tuple(f"class {number}" for number in range(classes)))
