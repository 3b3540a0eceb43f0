"""Estimate the memory of a client's part of a model, without allocating its weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from semisfl.models.layers import named_layers
from semisfl.models.shapes import Placed, Shape, place
from semisfl.models.split import cut_index, uncut
from semisfl.models.zoo import MODELS
from semisfl.settings.layer_kinds import Flatten
from semisfl.settings.run import ModelConfig

FP32 = 4


@dataclass(frozen=True)
class Footprint:
    """Count the weights of some layers, and the activations that training keeps for one image."""

    parameters: int
    activations: int

    def bytes(self, batch: int, copies: int, kept: int) -> int:
        """Return the bytes of ``copies`` of the weights and ``kept`` batches of activations, in fp32.

        They leave out the framework's own code and its workspace for convolutions.
        """
        return FP32 * (copies * self.parameters + kept * batch * self.activations)


def footprint(layers: Sequence[Placed]) -> Footprint:
    return Footprint(sum(layer.parameters for layer in layers), sum(map(activations, layers)))


def activations(placed: Placed) -> int:
    """Return the values for one image that a backward pass needs, inner layers included."""
    # A flattened tensor shares the memory of its input.
    own = 0 if isinstance(placed.layer, Flatten) else prod(placed.gives)
    return own + sum(map(activations, (*placed.body, *placed.shortcut)))


def of_model(model: ModelConfig, shape: Shape, classes: int) -> tuple[Footprint, Footprint]:
    """Return the footprints of the clients' part and of the whole model."""
    table = model.table
    # Tensors on "meta" have a shape but no memory, so a large model is built at once.
    with torch.device("meta"):
        modules = named_layers(uncut(table, shape, classes))
    layers = place(MODELS[table].table() if isinstance(table, str) else table, shape, classes)
    return footprint(layers[: cut_index(modules, model.cut)]), footprint(layers)


def amount(size: float) -> str:
    """Return bytes in GB or, below one, in MB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
