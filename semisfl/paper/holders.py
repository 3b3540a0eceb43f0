"""Who holds what of CIFAR-10 under a distribution: needs no images, as every class has 5,000."""

from dataclasses import dataclass
from statistics import median

import numpy as np

from semisfl.data.partition import Partition, split
from semisfl.paper.grid import Cell
from semisfl.settings.catalog import DATA

IMAGES_PER_CLASS = {"cifar10": 5000}
MOST = 0.9
"""The share of a client's images whose classes are counted."""


@dataclass(frozen=True)
class Holders:
    partition: Partition
    labels: np.ndarray
    classes: tuple[str, ...]

    @property
    def sizes(self) -> list[int]:
        return sorted(len(rows) for rows in self.partition.clients)

    @property
    def main_classes(self) -> float:
        """How many classes make most of a client's images, in the median."""
        return median(
            _needed(np.bincount(self.labels[rows], minlength=len(self.classes)))
            for rows in self.partition.clients
        )


def _needed(counts: np.ndarray) -> int:
    largest_first = np.sort(counts)[::-1].cumsum()
    return int(np.searchsorted(largest_first, MOST * largest_first[-1])) + 1


def holders(cell: Cell, seed: int = 0) -> Holders:
    """Which image is whose depends on the data's order; how many of each class do not."""
    config = cell.config(seed=seed)
    kind = config.data.partition.kind
    assert kind != "folders"
    classes = DATA[config.data.name].classes
    labels = np.repeat(np.arange(classes), IMAGES_PER_CLASS[config.data.name])
    partition = split(
        labels,
        labeled=config.data.labeled,
        clients=config.clients.total,
        kind=kind,
        alpha=config.data.partition.alpha,
        seed=seed,
        classes=classes,
    )
    return Holders(partition, labels, tuple(f"class {number}" for number in range(classes)))
