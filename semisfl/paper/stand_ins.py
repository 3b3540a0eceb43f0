"""Public data that stands in for a set of the paper which is hard to get, and how far it does."""

from dataclasses import dataclass

from semisfl.paper.grid import SETS


@dataclass(frozen=True)
class StandIn:
    called: str
    """As it is named beside every number that was measured on it."""
    changes: tuple[str, ...]
    """To the paper's settings, ``key=value``."""


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
    return SETS.get(preset.partition("+")[0], preset)
