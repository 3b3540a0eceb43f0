"""Estimate the memory of a client's part of a model, for `plan` and `inspect`; nothing is allocated for it.

The estimate leaves out the framework's own code and its workspace for convolutions.
"""

from math import prod

from semisfl.models.shapes import Placed
from semisfl.settings.layer_kinds import Flatten

FP32 = 4
"""Bytes of a value."""


def activations(placed: Placed) -> int:
    """Return the values for one image that a layer's backward pass needs, inner layers included."""
    # A flattened tensor shares the memory of its input.
    own = 0 if isinstance(placed.layer, Flatten) else prod(placed.gives)
    return own + sum(map(activations, (*placed.body, *placed.shortcut)))


def training_bytes(parameters: int, activations: int, batch: int, *, copies: int, kept: int) -> int:
    """Return the bytes that training takes in fp32.

    ``parameters``: values of the weights, of which there are ``copies`` (weights, teacher, gradients,
    momentum). ``activations``: values that a backward pass needs for one image; those of ``kept`` batches of
    ``batch`` images are in memory at a time.
    """
    return FP32 * (copies * parameters + kept * batch * activations)
