"""Estimate the memory of a client's part of a model, without allocating its weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from semisfl.models.shapes import Placed, Sides
from semisfl.settings.layer_kinds import Conv, Drop, Flatten, Pool

FP32 = 4
BLOCK = 16
"""A CPU may copy what a convolution takes and gives into blocks of so many channels."""


@dataclass(frozen=True)
class Footprint:
    """Count the weights of some layers, and the activations that training keeps for one image."""

    parameters: int
    activations: int
    passing: int = 0
    """Most values of one image that a pass without gradients holds at a time."""
    copied: int = 0
    """Most values that a convolution copies of one image."""
    windows: int = 0
    """Most values that a convolution unrolls of one image."""
    beside: int = 0
    """Values that layers keep beside their output: where a max-pool found each, and which dropout left."""

    def bytes(self, batch: int, copies: int, kept: int) -> int:
        """Return the bytes of ``copies`` of the weights and ``kept`` batches of activations, in fp32.

        They leave out the framework's own code and its workspace for convolutions.
        """
        return FP32 * (copies * self.parameters + kept * batch * self.activations)

    def workspace(self, batch: int, kept: int = 1) -> int:
        """Return the most bytes that layers need besides while two passes run at a time, ``kept`` of them for training."""
        windows = torch.get_num_threads() * self.windows
        return FP32 * (batch * (2 * self.copied + kept * self.beside) + windows)


def footprint(layers: Sequence[Placed]) -> Footprint:
    return Footprint(
        sum(layer.parameters for layer in layers),
        sum(map(activations, layers)),
        max(map(_passing, layers), default=0),
        max(map(_copied, layers), default=0),
        max(map(_windows, layers), default=0),
        sum(map(_beside, layers)),
    )


def activations(placed: Placed) -> int:
    """Return the values for one image that a backward pass needs, inner layers included."""
    # A flattened tensor shares the memory of its input.
    own = 0 if isinstance(placed.layer, Flatten) else prod(placed.gives)
    return own + sum(map(activations, _inside(placed)))


def _passing(placed: Placed) -> int:
    # A max-pool gives a position of 8 bytes with every value.
    output = prod(placed.gives) * (3 if isinstance(placed.layer, Pool) else 1)
    inner = max(map(_passing, _inside(placed)), default=0)
    return prod(placed.takes) + output + _copied(placed) + inner


def _copied(placed: Placed) -> int:
    if isinstance(layer := placed.layer, Conv):
        # The blocks hold channels of one group, unless every group has only one.
        depthwise = placed.takes[0] == placed.gives[0] == layer.groups
        groups = 1 if depthwise else layer.groups
        return sum(_in_blocks(sides, groups) for sides in (placed.takes, placed.gives))
    return max(map(_copied, _inside(placed)), default=0)


def _in_blocks(sides: Sides, groups: int) -> int:
    return groups * -(-sides[0] // groups // BLOCK) * BLOCK * prod(sides[1:])


def _windows(placed: Placed) -> int:
    if isinstance(layer := placed.layer, Conv):
        return placed.takes[0] // layer.groups * layer.kernel**2 * prod(placed.gives[1:])
    return max(map(_windows, _inside(placed)), default=0)


def _beside(placed: Placed) -> int:
    # A position has 8 bytes.
    each = {Pool: 2, Drop: 1}.get(type(placed.layer), 0)
    return each * prod(placed.gives) + sum(map(_beside, _inside(placed)))


def _inside(placed: Placed) -> tuple[Placed, ...]:
    return (*placed.body, *placed.shortcut)
