"""Compute the costs of each layer and of every cut of a model, without allocating its weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch

from semisfl.fleet.codec import codec_named, tensor_bytes
from semisfl.methods.sizes import Sizes
from semisfl.models.build import uncut, widest_head
from semisfl.models.layers import batchnorms, named_layers
from semisfl.models.memory import FP32, activations, training_bytes
from semisfl.models.shapes import Placed, Shape, pair, place
from semisfl.models.split import NARROW_HEAD, cut_index
from semisfl.models.zoo import MODELS
from semisfl.settings.config import Config
from semisfl.settings.layer_kinds import Attention, Conv, Linear
from semisfl.settings.run import WireConfig

Tensors = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Shapes and dtypes of the tensors of a state."""


@dataclass(frozen=True)
class LayerCost:
    """Sizes and operations of one layer of a model's table; inner layers of a block count to it."""

    name: str
    state: Tensors
    """Weights and buffers."""
    statistics: Tensors
    """BatchNorm's buffers, a part of ``state``."""
    parameters: int
    gives: int
    """Output values for one image."""
    kept: int
    """Activation values for one image that a backward pass needs, inner layers included."""
    live: int
    """Most values for one image in memory at a time if there is no backward pass."""
    flops: int
    """Operations of one image's forward pass: those of convolutions and matrix products."""


@dataclass(frozen=True)
class Cut:
    """A model with its first ``index`` layers on the clients."""

    layers: tuple[LayerCost, ...]
    index: int
    widest_head: int = NARROW_HEAD
    """Most features for which the projection head is as wide as its input."""

    @property
    def name(self) -> str:
        """Return the name of the last layer on the clients."""
        return self.layers[self.index - 1].name

    @cached_property
    def features(self) -> int:
        """Return the values that one image's features have."""
        return self.layers[self.index - 1].gives

    @cached_property
    def bottom_flops(self) -> int:
        """Return the operations of one image's forward pass through the clients' part."""
        return sum(layer.flops for layer in self.layers[: self.index])

    @cached_property
    def flops(self) -> int:
        """Return the operations of one image's forward pass through the whole model."""
        return sum(layer.flops for layer in self.layers)

    @cached_property
    def possible(self) -> bool:
        """Return whether both sides have parameters to train."""
        sides = (self.layers[: self.index], self.layers[self.index :])
        return all(any(layer.parameters for layer in side) for side in sides)

    def head_flops(self, kind: str, projection: int, embedded: bool = False) -> int:
        """Return the operations of the projection head for one row; ``embedded``: it reads what the last layer reads."""
        read = self.layers[-2].gives if embedded else self.features
        hidden = read if read <= self.widest_head else NARROW_HEAD
        widths = {"mlp": (hidden, projection), "linear": (projection,), "none": ()}[kind]
        return sum(2 * a * b for a, b in zip((read, *widths), widths, strict=False))

    def sizes(
        self,
        batch: int,
        steps: int,
        wire: WireConfig,
        resent: bool = False,
    ) -> Sizes:
        """Return the bytes of what one client exchanges in a round with so many ``steps`` of ``batch`` images.

        They are encoded with the codecs of ``wire``. ``resent``: a method's state that devices keep is sent again.
        """

        def states(layers: Sequence[LayerCost]) -> int:
            return sum(tensor_bytes(item, wire.models) for layer in layers for item in layer.state)

        buffers = [item for layer in self.layers for item in layer.statistics]
        rows = (batch, self.features)
        return Sizes(
            bottom=states(self.layers[: self.index]),
            full=states(self.layers),
            statistics=sum(tensor_bytes(item, wire.models) for item in buffers),
            student_features=steps * codec_named(wire.student_features).size(rows),
            teacher_features=steps * codec_named(wire.teacher_features).size(rows),
            gradients=steps * codec_named(wire.gradients).size(rows),
            resent=resent,
        )

    def memory(self, batch: int, copies: int, kept: int, *, whole: bool = False) -> int:
        """Return the bytes of weights and activations in a client's memory.

        ``copies`` counts sets of weights (student, teacher, gradients, momentum), ``kept`` the passes whose
        activations stay for a backward pass. ``whole``: the client holds the whole model, not its bottom.
        """
        layers = self.layers if whole else self.layers[: self.index]
        parameters = sum(layer.parameters for layer in layers)
        activations = sum(layer.kept for layer in layers)
        return training_bytes(parameters, activations, batch, copies=copies, kept=kept)

    def encoding_memory(self, batch: int) -> int:
        """Return the bytes of weights and activations of a client that encodes ``batch`` views at a time."""
        layers = self.layers[: self.index]
        return self.memory(0, 1, 0) + FP32 * batch * max(layer.live for layer in layers)


def cut_of(config: Config, shape: Shape, classes: int) -> Cut:
    """Return the configured model with the configured cut, for images of ``shape`` (channels, height, width)."""
    table = config.model.table
    # Tensors on "meta" have a shape but no memory, so a large model is built at once.
    with torch.device("meta"):
        modules = named_layers(uncut(table, shape, classes))
    placed = place(MODELS[table].table() if isinstance(table, str) else table, shape, classes)
    layers = []
    for (name, module), layer in zip(modules, placed, strict=True):
        state = module.state_dict()
        layers.append(
            LayerCost(
                name,
                _tensors(state),
                tuple(
                    item
                    for part in batchnorms(module)
                    for item in _tensors(dict(part.named_buffers()))
                ),
                layer.parameters,
                prod(layer.gives),
                activations(layer),
                _live(layer),
                _flops(layer),
            )
        )
    index = cut_index(modules, config.model.cut)
    return Cut(tuple(layers), index, widest_head(table, shape))


def every_cut(cut: Cut) -> list[Cut]:
    """Return all cuts of a model that leave both sides parameters to train, from the first layer to the last."""
    cuts = [replace(cut, index=index) for index in range(1, len(cut.layers))]
    return [one for one in cuts if one.possible]


def _tensors(state: Mapping[str, torch.Tensor]) -> Tensors:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in state.values())


def _live(placed: Placed) -> int:
    """Return what a layer reads and writes; a block keeps its input while its inner layers compute."""
    inner = [_live(layer) for layer in (*placed.body, *placed.shortcut)]
    return prod(placed.takes) + max(inner or [prod(placed.gives)])


def _flops(placed: Placed) -> int:
    """Return a multiplication and an addition per weight and output position; other layers count 0."""
    layer = placed.layer
    if isinstance(layer, Conv):
        per_position = 2 * prod(pair(layer.kernel)) * (placed.takes[0] // layer.groups)
        return per_position * prod(placed.gives)
    if isinstance(layer, Linear):
        return 2 * placed.takes[-1] * prod(placed.gives)
    if isinstance(layer, Attention):
        count, width = (
            placed.takes
        )  # four products with weights, and two of all tokens with all tokens
        return 8 * count * width**2 + 4 * count**2 * width
    return sum(_flops(inner) for inner in (*placed.body, *placed.shortcut))
