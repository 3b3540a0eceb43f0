"""The kinds of layers of a model that is written as a table, with their settings and limits. Loads no torch.

A table is a list of layers like ``{kind = "conv", channels = 32}``. The shape of a layer's input follows
from the layers before it (`semisfl.models.shapes`); settings that are left out are PyTorch's. A server sends its
table to devices that never saw it, so everything in it has a limit.

What flows between layers has one of three shapes per image: a *picture* [channels, height, width], *tokens*
[number, width] (a vision transformer's sequence), or flat features [length]. `Linear` and `LayerNorm` act on the
last axis of tokens.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    model_serializer,
)

from semisfl.settings.sections import one_line

MAX_LAYERS = 320
"""Most layers of a whole table, those inside blocks included."""
MAX_DEPTH = 4
"""Most blocks inside each other."""
MAX_WIDTH = 65_536
MAX_SIDE = 64


class LayerBase(BaseModel):
    """The fields of every layer: its kind, and a name by which it can be cut after and its weights are stored.

    Layers are written out without settings that have their default.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,40}$")
    """Letters, digits, - and _, at most 40; none: the kind with a number (`named`)."""

    @model_serializer(mode="wrap")
    def _brief(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the settings that differ from their defaults, and the kind."""
        return {
            key: value
            for key, value in serialize(self).items()
            if key == "kind" or getattr(self, key) != type(self).model_fields[key].default
        }


Side = Annotated[int, Field(ge=1, le=MAX_SIDE)]
Window = Side | tuple[Side, Side]
"""A number for both sides of a window, or one for its height and one for its width."""
Pad = Annotated[int, Field(ge=0, le=MAX_SIDE)]
Epsilon = Annotated[float, Field(gt=0, le=1)]


class Conv(LayerBase):
    """A two-dimensional convolution, ``nn.Conv2d``.

    ``padding`` is a number of pixels for all sides, a pair (above and below, left and right), four numbers (left,
    right, above, below), or "same": as many as give an image of 1/stride of the size, as in TensorFlow.
    """

    kind: Literal["conv"] = "conv"
    channels: int = Field(ge=1, le=MAX_WIDTH)
    kernel: Window = 3
    stride: Window = 1
    padding: Pad | tuple[Pad, Pad] | tuple[Pad, Pad, Pad, Pad] | Literal["same"] = 0
    bias: bool = True
    groups: int = Field(1, ge=1, le=MAX_WIDTH)


class BatchNorm(LayerBase):
    """Normalise each channel over the images of a batch; ``momentum`` is the weight of the newest batch.

    With ``stored`` it normalises by its stored statistics in training too, and these stay as they are.
    """

    kind: Literal["batchnorm"] = "batchnorm"
    eps: Epsilon = 1e-5
    momentum: float = Field(0.1, gt=0, le=1)
    stored: bool = False


class GroupNorm(LayerBase):
    """Normalise the channels of one image in ``groups``; it does not look at other images."""

    kind: Literal["groupnorm"] = "groupnorm"
    groups: int = Field(ge=1, le=MAX_WIDTH)


class LayerNorm(LayerBase):
    """Normalise all values of one image; with ``per_position``, the channels at each position of a picture.

    Each token is normalised by itself.
    """

    kind: Literal["layernorm"] = "layernorm"
    eps: Epsilon = 1e-5
    per_position: bool = False


class Relu(LayerBase):
    """max(x, 0)."""

    kind: Literal["relu"] = "relu"


class Relu6(LayerBase):
    """min(max(x, 0), 6)."""

    kind: Literal["relu6"] = "relu6"


class Gelu(LayerBase):
    """x times the normal distribution function of x."""

    kind: Literal["gelu"] = "gelu"


class Silu(LayerBase):
    """x sigmoid(x), also called swish."""

    kind: Literal["silu"] = "silu"


class Hardswish(LayerBase):
    """x min(max(x + 3, 0), 6) / 6."""

    kind: Literal["hardswish"] = "hardswish"


class Hardsigmoid(LayerBase):
    kind: Literal["hardsigmoid"] = "hardsigmoid"


class Sigmoid(LayerBase):
    """1 / (1 + exp(-x))."""

    kind: Literal["sigmoid"] = "sigmoid"


class Scale(LayerBase):
    """Multiply each channel, or each column of tokens, by a learned factor that starts at ``start``."""

    kind: Literal["scale"] = "scale"
    start: float = Field(1e-5, ge=-1e3, le=1e3)


class Pool(LayerBase):
    """The largest of each square; ``stride`` none: squares side by side."""

    kind: Literal["pool"] = "pool"
    size: Window = 2
    stride: Window | None = None
    padding: Pad = 0


class AveragePool(LayerBase):
    """The mean of each square; ``size`` none: of the whole picture."""

    kind: Literal["avgpool"] = "avgpool"
    size: Window | None = None
    stride: Window | None = None


class Drop(LayerBase):
    """Set values to 0 with probability ``p`` in training, and divide the others by 1 - p."""

    kind: Literal["dropout"] = "dropout"
    p: float = Field(0.5, ge=0, lt=1)


class Flatten(LayerBase):
    """Lay all values of an image in one row, as linear layers take them."""

    kind: Literal["flatten"] = "flatten"


class Linear(LayerBase):
    """``features`` none, for the last one: as many as there are classes."""

    kind: Literal["linear"] = "linear"
    features: int | None = Field(None, ge=1, le=MAX_WIDTH)
    bias: bool = True


class Tokens(LayerBase):
    """Turn a picture [channels, height, width] into tokens [height x width, channels], row by row."""

    kind: Literal["tokens"] = "tokens"


class ClassToken(LayerBase):
    """Put a learned token before the others."""

    kind: Literal["classtoken"] = "classtoken"


class Positions(LayerBase):
    """Add a learned vector to each token, by its place."""

    kind: Literal["positions"] = "positions"


class Attention(LayerBase):
    """Self-attention over tokens with ``heads`` heads; ``bias``: whether queries, keys and values have one."""

    kind: Literal["attention"] = "attention"
    heads: int = Field(ge=1, le=256)
    bias: bool = True


class FirstToken(LayerBase):
    """Keep the first token, the class token, as flat features."""

    kind: Literal["firsttoken"] = "firsttoken"


class Block(LayerBase):
    """Layers under one name, so that a model can be cut after them."""

    kind: Literal["block"] = "block"
    body: tuple["AnyLayer", ...] = Field(min_length=1)


class ResidualBlock(LayerBase):
    """body(x) + shortcut(x); an empty shortcut is x itself."""

    kind: Literal["residual"] = "residual"
    body: tuple["AnyLayer", ...] = Field(min_length=1)
    shortcut: tuple["AnyLayer", ...] = ()


class Gate(LayerBase):
    """x body(x), as in squeeze-and-excitation; the body gives a number per value or per channel."""

    kind: Literal["gate"] = "gate"
    body: tuple["AnyLayer", ...] = Field(min_length=1)


Norm = BatchNorm | GroupNorm | LayerNorm
Activation = Relu | Relu6 | Gelu | Silu | Hardswish | Hardsigmoid | Sigmoid
Token = Tokens | ClassToken | Positions | Attention | FirstToken
Nested = Block | ResidualBlock | Gate
Layer = (
    Conv | Norm | Activation | Scale | Pool | AveragePool | Drop | Flatten | Linear | Token | Nested
)
AnyLayer = Annotated[Layer, Field(discriminator="kind")]


def tables_in(layer: Layer) -> list[tuple[Layer, ...]]:
    """Return the body of a block, and its shortcut if it has one; nothing for a single layer."""
    return [getattr(layer, part) for part in ("body", "shortcut") if hasattr(layer, part)]


def store_statistics(layer: Layer) -> Layer:
    """Return the layer with every BatchNorm in it normalising by its stored statistics."""
    parts: dict[str, Any] = {
        part: tuple(map(store_statistics, getattr(layer, part)))
        for part in ("body", "shortcut")
        if hasattr(layer, part)
    }
    if isinstance(layer, BatchNorm):
        parts["stored"] = True
    return layer.model_copy(update=parts)


def _check_table(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Refuse an empty or too long table, too deep blocks, and two layers of one name beside each other."""
    if not 0 < (count := _check_part(layers, MAX_DEPTH)) <= MAX_LAYERS:
        raise ValueError(
            f"model.layers has {count} layers, blocks included; it must have 1 to {MAX_LAYERS}"
        )
    return layers


def _check_part(layers: tuple[Layer, ...], depth: int) -> int:
    """Return the number of layers, those in blocks included; at most ``depth`` blocks may be inside each other."""
    if depth < 0:
        raise ValueError(f"model.layers has more than {MAX_DEPTH} blocks inside each other")
    names = Counter(layer.name for layer in layers if layer.name is not None)
    if twice := [name for name, times in names.items() if times > 1]:
        raise ValueError(f"model.layers has two layers called {twice[0]!r}; rename one of them")
    return len(layers) + sum(
        _check_part(part, depth - 1) for layer in layers for part in tables_in(layer)
    )


Layers = Annotated[tuple[AnyLayer, ...], AfterValidator(_check_table)]
"""A whole table: at most `MAX_LAYERS`, and no name twice beside each other."""
_TABLE: TypeAdapter[tuple[Layer, ...]] = TypeAdapter(Layers)


def parse_layers(values: Any) -> tuple[Layer, ...]:
    """Return a checked table from plain values, or from layers.

    Raises ValueError with one line that names a mistake's place, for example ``model.layers[2].conv.channels``.
    """
    try:
        return _TABLE.validate_python(values)
    except ValidationError as error:
        raise ValueError(one_line(error, LayerBase, (), "model.layers.")) from error


def name_layers(layers: Sequence[Layer]) -> list[tuple[str, Layer]]:
    """Return every layer with its name; one without is named after its kind, with a number that is not taken."""
    taken = {layer.name for layer in layers}
    counts: dict[str, int] = {}
    result = []
    for layer in layers:
        counts[layer.kind] = counts.get(layer.kind, 0) + 1
        name = layer.name or f"{layer.kind}{counts[layer.kind]}"
        while layer.name is None and name in taken:
            name += "_"
        taken.add(name)
        result.append((name, layer))
    return result
