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
    "image100": StandIn(
        "mini-ImageNet: 100 other classes, 84×84", ("data.name=miniimagenet", "data.labeled=5000")
    ),
}


def set_title(preset: str) -> str:
    return SETS.get(preset, preset)
