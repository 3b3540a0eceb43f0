"""Compute the input and output shape of every layer, and check them before anything is allocated.

One rule per kind of layer gives the shape of its output and the number of its parameters. A server, a device and
`plan` use the same rules; none of them needs torch's memory for it.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

from semisfl.settings.counts import plural
from semisfl.settings.layer_kinds import (
    Attention,
    AveragePool,
    BatchNorm,
    ClassToken,
    Conv,
    FirstToken,
    Flatten,
    Gate,
    GroupNorm,
    Layer,
    LayerNorm,
    Linear,
    Pool,
    Positions,
    ResidualBlock,
    Scale,
    Tokens,
    Window,
    name_layers,
    tables_in,
)

Shape = tuple[int, int, int]
"""Channels, height and width of an image."""
Sides = tuple[int, ...]
"""A layer's output for one image: channels, height and width; tokens and their width; or one length."""
Margins = tuple[int, int, int, int]
"""Pixels around a picture: left, right, above, below, in the order of ``F.pad``."""

# Larger than any usual model, small enough that a server cannot exhaust a device's memory.
MAX_PARAMETERS = 2**30
MAX_OUTPUT = 2**24
"""Largest number of values that one layer may output for one image."""


class Placed(NamedTuple):
    """A layer with the shapes of its input and output for one image, and its number of parameters.

    ``body`` and ``shortcut`` are the layers inside a residual block.
    """

    name: str
    layer: Layer
    takes: Sides
    gives: Sides
    parameters: int
    body: "tuple[Placed, ...]" = ()
    shortcut: "tuple[Placed, ...]" = ()


def place(
    layers: Sequence[Layer], shape: Shape, classes: int, *, whole: bool = True
) -> list[Placed]:
    """Return the layers of a table with the shapes of their inputs and outputs.

    Args:
        layers: the table.
        shape: channels, height and width of an image.
        classes: how many outputs the last linear layer gets if it names none.
        whole: whether the table must end with one number per class; a bottom alone need not.

    Raises ValueError for a layer that does not fit its input, for a whole model that does not end so, and beyond `MAX_PARAMETERS` and `MAX_OUTPUT`.
    """
    last = max((i for i, layer in enumerate(layers) if isinstance(layer, Linear)), default=-1)
    full = [
        layer.model_copy(update={"features": classes})
        if index == last and isinstance(layer, Linear) and layer.features is None
        else layer
        for index, layer in enumerate(layers)
    ]
    placed = _place(full, shape, "model.layers")
    gives = placed[-1].gives
    if whole and gives != (classes,):
        raise ValueError(
            f"model.layers gives {_text(gives)} numbers for an image, but there are {classes} classes; "
            "end it with a linear layer and leave its features out"
        )
    parameters = sum(one.parameters for one in placed)
    if parameters > MAX_PARAMETERS:
        raise ValueError(
            f"the model would have {parameters:,} parameters, the limit is {MAX_PARAMETERS:,}; "
            "make it narrower, or pool more before its linear layers"
        )
    return placed


def _place(layers: Sequence[Layer], takes: Sides, where: str) -> list[Placed]:
    """Return the layers of a table or of a part of a block; ``where`` names it in messages."""
    placed = []
    for index, (name, layer) in enumerate(name_layers(layers)):
        one = _place_one(name, layer, takes, f"{where}[{index}]")
        if prod(one.gives) > MAX_OUTPUT:
            raise ValueError(
                f"{where}[{index}] ({layer.kind}) gives {_text(one.gives)} numbers for an image, the limit "
                f"is {MAX_OUTPUT:,}; use fewer channels or a larger stride"
            )
        placed.append(one)
        takes = one.gives
    return placed


def _place_one(name: str, layer: Layer, takes: Sides, where: str) -> Placed:
    """Return one layer on its input; errors get its place in the table."""
    if tables_in(layer):
        return _place_block(name, layer, takes, where)
    try:
        rule = RULES.get(type(layer))
        gives, parameters = rule(layer, takes) if rule else (takes, 0)
    except ValueError as error:
        raise ValueError(f"{where} ({layer.kind}) {error}") from error
    return Placed(name, layer, takes, gives, parameters)


def _place_block(name: str, layer: Any, takes: Sides, where: str) -> Placed:
    """Place the body, and the shortcut if there is one, on the same input, and check that their outputs fit."""
    body = _place(layer.body, takes, f"{where}.body")
    shortcut = _place(getattr(layer, "shortcut", ()), takes, f"{where}.shortcut")
    gives, parameters = body[-1].gives, sum(one.parameters for one in (*body, *shortcut))
    if isinstance(layer, Gate):
        if gives not in (takes, (takes[0], *[1] * (len(takes) - 1))):
            raise ValueError(
                f"{where} (gate) multiplies {_text(takes)} by {_text(gives)} of its body; a body gives as many "
                "numbers as it takes, or one per channel"
            )
        gives = takes
    added = shortcut[-1].gives if shortcut else takes
    if isinstance(layer, ResidualBlock) and gives != added:
        raise ValueError(
            f"{where} (residual) adds {_text(gives)} of its body to {_text(added)} of its shortcut; "
            "give the shortcut a conv with kernel 1 and the body's channels and stride"
        )
    return Placed(name, layer, takes, gives, parameters, tuple(body), tuple(shortcut))


# --- one rule per kind: output shape and number of parameters ------------------------------------------


def _conv(layer: Conv, takes: Sides) -> tuple[Sides, int]:
    """Output positions from the window; one weight per output channel, input channel of its group and kernel pixel."""
    channels, height, width = _picture(takes)
    for count, dimension in ((channels, "input channels"), (layer.channels, "channels")):
        if count % layer.groups:
            raise ValueError(
                f"has groups = {layer.groups}, which does not divide its {count} {dimension}; choose a divisor"
            )
    sides = _window(height, width, layer.kernel, layer.stride, margins(layer, takes))
    weights = layer.channels * (channels // layer.groups) * prod(pair(layer.kernel))
    return (layer.channels, *sides), weights + layer.bias * layer.channels


def _groupnorm(layer: GroupNorm, takes: Sides) -> tuple[Sides, int]:
    """The shape stays; a scale and an offset per channel."""
    channels, *_ = _picture(takes)
    if channels % layer.groups:
        raise ValueError(
            f"has groups = {layer.groups}, which does not divide its {plural(channels, 'channel')}; choose a divisor"
        )
    return takes, 2 * channels


def _layernorm(layer: LayerNorm, takes: Sides) -> tuple[Sides, int]:
    """The shape stays; a scale and an offset for every value that is normalised together."""
    return takes, 2 * prod(normalised(layer, takes))


def _pool(layer: Pool, takes: Sides) -> tuple[Sides, int]:
    """Output positions from the window; nothing is trained."""
    channels, height, width = _picture(takes)
    if 2 * layer.padding > min(pair(layer.size)):
        raise ValueError(
            f"has padding = {layer.padding}, more than half of size = {layer.size}; use at most half"
        )
    stride = layer.stride or layer.size
    around = (layer.padding,) * 4
    return (channels, *_window(height, width, layer.size, stride, around)), 0


def _average_pool(layer: AveragePool, takes: Sides) -> tuple[Sides, int]:
    """Like `_pool`; without a size one value per channel, whatever the picture's size."""
    channels, height, width = _picture(takes)
    if layer.size is None:
        return (channels, 1, 1), 0
    around = (0, 0, 0, 0)
    return (channels, *_window(height, width, layer.size, layer.stride or layer.size, around)), 0


def _linear(layer: Linear, takes: Sides) -> tuple[Sides, int]:
    """One weight per input and output on the last axis, and a bias per output."""
    if len(takes) > 2:
        raise ValueError(f"is given {_text(takes)}; put a flatten before it")
    if layer.features is None:
        raise ValueError("has no features; only the last linear layer may leave them out")
    return (*takes[:-1], layer.features), (takes[-1] + layer.bias) * layer.features


def _tokens(layer: Tokens, takes: Sides) -> tuple[Sides, int]:
    """One token per position, whose width is the number of channels."""
    channels, height, width = _picture(takes)
    return (height * width, channels), 0


def _class_token(layer: ClassToken, takes: Sides) -> tuple[Sides, int]:
    """One token more, which is learned."""
    count, width = _sequence(takes)
    return (count + 1, width), width


def _attention(layer: Attention, takes: Sides) -> tuple[Sides, int]:
    """The shape stays; queries, keys, values and the projection each have width x width weights."""
    _, width = _sequence(takes)
    if width % layer.heads:
        raise ValueError(
            f"has heads = {layer.heads}, which does not divide tokens of width {width}; choose a divisor"
        )
    return takes, 4 * width * width + (3 * layer.bias + 1) * width


RULES: dict[type[Layer], Callable[[Any, Sides], tuple[Sides, int]]] = {
    Conv: _conv,
    BatchNorm: lambda layer, takes: (takes, 2 * takes[0]),
    GroupNorm: _groupnorm,
    LayerNorm: _layernorm,
    Scale: lambda layer, takes: (takes, columns(takes)),
    Pool: _pool,
    AveragePool: _average_pool,
    Flatten: lambda layer, takes: ((prod(takes),), 0),
    Linear: _linear,
    Tokens: _tokens,
    ClassToken: _class_token,
    Positions: lambda layer, takes: (takes, prod(_sequence(takes))),
    Attention: _attention,
    FirstToken: lambda layer, takes: (_sequence(takes)[1:], 0),
}


def pair(sides: Window) -> tuple[int, int]:
    """Return a window's height and width from one number, for squares, or from a pair."""
    return (sides, sides) if isinstance(sides, int) else sides


def margins(layer: Conv, takes: Sides) -> Margins:
    """Return the pixels that a convolution adds around a picture [channels, height, width]: left, right, above, below.

    ``padding = "same"`` is TensorFlow's: as many positions as the stride gives, and an odd pixel goes right and below.
    """
    padding = layer.padding
    if padding == "same":
        _, *sides = takes
        total = [
            max((-(-side // stride) - 1) * stride + kernel - side, 0)
            for side, stride, kernel in zip(
                sides, pair(layer.stride), pair(layer.kernel), strict=True
            )
        ]
        (above, left), (below, right) = (
            [one // 2 for one in total],
            [-(-one // 2) for one in total],
        )
        return left, right, above, below
    if isinstance(padding, int):
        return (padding,) * 4
    if len(padding) == 2:
        vertical, horizontal = padding
        return horizontal, horizontal, vertical, vertical
    return padding


def normalised(layer: LayerNorm, takes: Sides) -> Sides:
    """Return the shape that a LayerNorm normalises together: all values of an image, or the channels of one position."""
    return (columns(takes),) if layer.per_position or len(takes) == 2 else takes


def columns(takes: Sides) -> int:
    """Return the channels of a picture, the width of tokens or the length of flat features.

    That is how many factors a layer has that scales each of them.
    """
    return takes[1] if len(takes) == 2 else takes[0]


def _picture(takes: Sides) -> Shape:
    """Return channels, height and width of an input; raise ValueError for flat features."""
    if len(takes) != 3:
        raise ValueError(
            f"takes pictures, and is given {_text(takes)}; put it before the flatten or the tokens"
        )
    return takes[0], takes[1], takes[2]


def _sequence(takes: Sides) -> tuple[int, int]:
    """Return count and width of tokens; raise ValueError for a picture or flat features."""
    if len(takes) != 2:
        raise ValueError(f"takes tokens, and is given {_text(takes)}; put a tokens layer before it")
    return takes[0], takes[1]


def _window(
    height: int, width: int, size: Window, stride: Window, around: Margins
) -> tuple[int, int]:
    """Return how many positions a window has on a picture with ``around`` pixels added."""
    left, right, above, below = around
    padded = height + above + below, width + left + right
    if any(side < window for side, window in zip(padded, pair(size), strict=True)):
        raise ValueError(
            f"is {size} pixels wide, but is given {height}x{width} and padding = {around}; "
            "use a smaller one, or larger images (data.size)"
        )
    high, wide = (
        (side - window) // step + 1
        for side, window, step in zip(padded, pair(size), pair(stride), strict=True)
    )
    return high, wide


def _text(sides: Sides) -> str:
    """Return a shape as ``4x8x8``."""
    return "x".join(map(str, sides))
