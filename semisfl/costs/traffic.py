"""What a round costs in bytes, by formula: down to and up from one active client, in fp32.

A run counts what really crosses; these say it beforehand, and tests hold the two together.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from semisfl.config import Config
from semisfl.engine.weights import batchnorms
from semisfl.fleet.codec import state_bytes
from semisfl.models import Shape, SplitModel, build


@dataclass(frozen=True)
class Sizes:
    """Bytes of what a round sends. The projection head and labels are never among it."""

    bottom: int
    """S_c, BatchNorm's buffers included."""
    full: int
    """S, bottom and top, BatchNorm's buffers included."""
    statistics: int
    """BatchNorm's buffers alone."""
    features: int
    """F = 4 B_u d K_u, a round's features of one model."""

    @classmethod
    def of(cls, model: SplitModel, batch: int, steps: int) -> "Sizes":
        bottom, top = (state_bytes(part.state_dict(), "fp32") for part in (model.bottom, model.top))
        layers = [*batchnorms(model.bottom), *batchnorms(model.top)]
        statistics = sum(state_bytes(dict(layer.named_buffers()), "fp32") for layer in layers)
        return cls(bottom, bottom + top, statistics, 4 * batch * model.features * steps)


@dataclass(frozen=True)
class Cost:
    down: int
    up: int

    @property
    def total(self) -> int:
        return self.down + self.up


def semisfl(sizes: Sizes) -> Cost:
    return Cost(2 * sizes.bottom + sizes.features, sizes.bottom + 2 * sizes.features)


def supervised(sizes: Sizes) -> Cost:
    return Cost(0, 0)


def semifl(sizes: Sizes) -> Cost:
    """A run of a model with BatchNorm exchanges statistics once more, for its last test: S down, theirs up."""
    return Cost(sizes.full + sizes.statistics, sizes.full + sizes.statistics)


def fedmatch(sizes: Sizes, helpers: int = 0) -> Cost:
    """Dense. ``helpers``: J in a round in which they are chosen anew, else 0."""
    return Cost((2 + helpers) * sizes.full, sizes.full)


def fedswitch(sizes: Sizes, teacher: bool = True) -> Cost:
    """``teacher``: whether the client downloads it."""
    return Cost((1 + teacher) * sizes.full, sizes.full)


def fedswitch_sl(sizes: Sizes, teacher: bool = True) -> Cost:
    down = (1 + teacher) * sizes.bottom + sizes.features
    return Cost(down, sizes.bottom + 2 * sizes.features)


# What named sets look like, so that a plan needs no data: image shape and classes.
LOOKS: dict[str, tuple[Shape, int]] = {
    "digits": ((1, 28, 28), 10),
    "svhn": ((3, 32, 32), 10),
    "cifar10": ((3, 32, 32), 10),
    "stl10": ((3, 96, 96), 10),
    "image100": ((3, 144, 144), 100),
}


def method_costs(
    config: Config, shape: Shape, classes: int, up: float, down: float
) -> list[dict[str, Any]]:
    """Every method's bytes for ``config``, and hours on the wire at ``up`` and ``down`` Mbit/s.

    Active clients transfer side by side; what they compute is not counted.
    """
    settings, clients = config.model, config.clients
    model = build(
        settings.table,
        shape,
        classes,
        cut=settings.cut,
        projector="none",
        projection=settings.projection,
    )
    sizes = Sizes.of(model, clients.batch, clients.steps)
    rows = []
    for method, cost_of in COSTS.items():
        cost = cost_of(sizes)
        seconds = 8e-6 * (cost.down / down + cost.up / up)
        rows.append(
            {
                "method": method,
                "down_bytes": cost.down,
                "up_bytes": cost.up,
                "round_seconds": seconds,
                "run_bytes": cost.total * clients.active * config.rounds,
                "run_hours": seconds * config.rounds / 3600,
            }
        )
    return rows


COSTS: dict[str, Callable[[Sizes], Cost]] = {
    "semisfl": semisfl,
    "supervised": supervised,
    "semifl": semifl,
    "fedmatch": fedmatch,
    "fedswitch": fedswitch,
    "fedswitch-sl": fedswitch_sl,
}
"""A usual round of each method; with a switch, the dearer one."""
