"""What each layer of a model costs, and with that every cut of it, without allocating its weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from semisfl.fleet.codec import codec_named, tensor_bytes
from semisfl.methods.sizes import Sizes
from semisfl.models.layers import batchnorms, named_layers
from semisfl.models.shapes import Placed, Shape, place
from semisfl.models.split import NARROW_HEAD, WIDEST_HEAD, cut_index, uncut
from semisfl.models.zoo import MODELS
from semisfl.settings.config import Config
from semisfl.settings.layer_kinds import Conv, Flatten, Linear
from semisfl.settings.run import WireConfig

Tensors = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Shapes and dtypes of a state."""
FP32 = 4


@dataclass(frozen=True)
class LayerCost:
    name: str
    state: Tensors
    """Weights and buffers."""
    statistics: Tensors
    """Of them BatchNorm's buffers."""
    parameters: int
    gives: int
    """Numbers that it makes of one image."""
    kept: int
    """Of those and what lies inside it, what a backward pass needs."""
    flops: int
    """Of one image's forward pass: products and sums of convolutions and matrices."""


@dataclass(frozen=True)
class Cut:
    """A model with so many of its layers on the clients."""

    layers: tuple[LayerCost, ...]
    index: int

    @property
    def name(self) -> str:
        return self.layers[self.index - 1].name

    @cached_property
    def features(self) -> int:
        return self.layers[self.index - 1].gives

    @cached_property
    def bottom_flops(self) -> int:
        return sum(layer.flops for layer in self.layers[: self.index])

    @cached_property
    def flops(self) -> int:
        return sum(layer.flops for layer in self.layers)

    @cached_property
    def possible(self) -> bool:
        """Whether both sides have something to train."""
        sides = (self.layers[: self.index], self.layers[self.index :])
        return all(any(layer.parameters for layer in side) for side in sides)

    def head_flops(self, kind: str, projection: int) -> int:
        """Of the projection head, for one row of features."""
        hidden = self.features if self.features <= WIDEST_HEAD else NARROW_HEAD
        widths = {"mlp": (hidden, projection), "linear": (projection,), "none": ()}[kind]
        return sum(2 * a * b for a, b in zip((self.features, *widths), widths, strict=False))

    def sizes(
        self,
        batch: int,
        steps: int,
        wire: WireConfig,
        resent: bool = False,
        images: int | None = None,
    ) -> Sizes:
        """Of what a round of so many steps sends, in the codecs of ``wire``.

        ``images``: as many as a client holds; it cannot show more different ones.
        """

        def states(layers: Sequence[LayerCost]) -> int:
            return sum(tensor_bytes(item, wire.models) for layer in layers for item in layer.state)

        buffers = [item for layer in self.layers for item in layer.statistics]
        rows = (batch, self.features)
        shown = (min(steps * batch, images or steps * batch), self.features)
        teacher = codec_named(wire.teacher_features)
        return Sizes(
            bottom=states(self.layers[: self.index]),
            full=states(self.layers),
            statistics=sum(tensor_bytes(item, wire.models) for item in buffers),
            student_features=steps * codec_named(wire.student_features).size(rows),
            teacher_features=steps * teacher.size(rows),
            gradients=steps * codec_named(wire.gradients).size(rows),
            teacher_once=teacher.size(shown) if wire.teacher_once else None,
            resent=resent,
        )

    def memory(self, batch: int, copies: int, kept: int, *, whole: bool = False) -> int:
        """Bytes of weights and activations in a client's memory, in fp32.

        Without what a framework needs besides: its own code and room for convolutions.
        """
        layers = self.layers if whole else self.layers[: self.index]
        weights = sum(FP32 * layer.parameters for layer in layers)
        return copies * weights + kept * batch * FP32 * sum(layer.kept for layer in layers)


def cut_of(config: Config, shape: Shape, classes: int) -> Cut:
    """The model a configuration names, cut as it says."""
    table = config.model.table
    # On "meta" tensors have a shape and no memory: a VGG16 takes no time.
    with torch.device("meta"):
        modules = named_layers(uncut(table, shape, classes))
    placed = place(MODELS[table].table() if isinstance(table, str) else table, shape, classes)
    layers = []
    for (name, module), row in zip(modules, placed, strict=True):
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
                row.parameters,
                prod(row.gives),
                _kept(row),
                _flops(row),
            )
        )
    return Cut(tuple(layers), cut_index(modules, config.model.cut))


def every_cut(cut: Cut) -> list[Cut]:
    """All cuts of a model that leave both sides something to train."""
    cuts = [Cut(cut.layers, index) for index in range(1, len(cut.layers))]
    return [one for one in cuts if one.possible]


def _tensors(state: Mapping[str, torch.Tensor]) -> Tensors:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in state.values())


def _kept(row: Placed) -> int:
    own = 0 if isinstance(row.layer, Flatten) else prod(row.gives)  # flat: the same memory
    return own + sum(_kept(inner) for inner in (*row.body, *row.shortcut))


def _flops(row: Placed) -> int:
    """A multiplication and an addition per weight and place; what other layers do is not counted."""
    layer = row.layer
    if isinstance(layer, Conv):
        per_place = 2 * layer.kernel**2 * (row.given[0] // layer.groups)
        return per_place * prod(row.gives)
    if isinstance(layer, Linear):
        return 2 * prod(row.given) * prod(row.gives)
    return sum(_flops(inner) for inner in (*row.body, *row.shortcut))
