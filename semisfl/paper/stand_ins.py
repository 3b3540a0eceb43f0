"""Public data that stands in for two data sets of the paper that are hard to get."""

from dataclasses import dataclass

from semisfl.paper.grid import SETS


@dataclass(frozen=True)
class StandIn:
    """Data used in place of the paper's."""

    called: str
    """The description shown beside every number measured on it."""
    changes: tuple[str, ...]
    """Changes to the paper's settings: ``key=value``."""


STAND_INS = {
    "stl10": StandIn(
        "STL-10 with 4,903 labels and no monkey in the test; in place of its unlabelled images "
        "mini-ImageNet resized to 96×96",
        ("data.labeled=4903", "data.unlabeled=miniimagenet"),
    ),
    "image100": StandIn(
        "mini-ImageNet: 100 other classes, 84×84", ("data.name=miniimagenet", "data.labeled=5000")
    ),
}


def set_title(preset: str) -> str:
    """Return the title of a preset's data set."""
    return SETS.get(preset.partition("+")[0], preset)
