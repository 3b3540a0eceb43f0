"""The kinds of layers of a model that is written as a table, with their settings and limits. Loads no torch.

A table is a list of layers like ``{kind = "conv", channels = 32}``. The shape of a layer's input follows
from the layers before it (`semisfl.models.shapes`); settings that are left out are PyTorch's. A server sends its
table to devices that never saw it, so everything in it has a limit.
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

MAX_LAYERS = 256
"""Most layers of a whole table, those inside residual blocks included."""
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


class Conv(LayerBase):
    """A square two-dimensional convolution, ``nn.Conv2d``."""

    kind: Literal["conv"] = "conv"
    channels: int = Field(ge=1, le=MAX_WIDTH)
    kernel: int = Field(3, ge=1, le=MAX_SIDE)
    stride: int = Field(1, ge=1, le=MAX_SIDE)
    padding: int = Field(0, ge=0, le=MAX_SIDE)
    bias: bool = True
    groups: int = Field(1, ge=1, le=MAX_WIDTH)


class BatchNorm(LayerBase):
    """Normalise each channel over the images of a batch, with running statistics: ``nn.BatchNorm2d`` or ``1d``."""

    kind: Literal["batchnorm"] = "batchnorm"


class GroupNorm(LayerBase):
    """Normalise the channels of one image in ``groups``; it does not look at other images."""

    kind: Literal["groupnorm"] = "groupnorm"
    groups: int = Field(ge=1, le=MAX_WIDTH)


class LayerNorm(LayerBase):
    """Normalise all values of one image, as ``nn.LayerNorm`` of the whole shape does."""

    kind: Literal["layernorm"] = "layernorm"


class Relu(LayerBase):
    """max(x, 0)."""

    kind: Literal["relu"] = "relu"


class Gelu(LayerBase):
    """x times the normal distribution function of x."""

    kind: Literal["gelu"] = "gelu"


class Pool(LayerBase):
    """The largest of each square; ``stride`` none: squares side by side."""

    kind: Literal["pool"] = "pool"
    size: int = Field(2, ge=1, le=MAX_SIDE)
    stride: int | None = Field(None, ge=1, le=MAX_SIDE)
    padding: int = Field(0, ge=0, le=MAX_SIDE)


class AveragePool(LayerBase):
    """The mean of each square; ``size`` none: of the whole picture."""

    kind: Literal["avgpool"] = "avgpool"
    size: int | None = Field(None, ge=1, le=MAX_SIDE)
    stride: int | None = Field(None, ge=1, le=MAX_SIDE)


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


Norm = BatchNorm | GroupNorm | LayerNorm
Inner = Conv | Norm | Relu | Gelu | Pool | AveragePool | Drop | Flatten | Linear


AnyInner = Annotated[Inner, Field(discriminator="kind")]


class ResidualBlock(LayerBase):
    """body(x) + shortcut(x); an empty shortcut is x itself."""

    kind: Literal["residual"] = "residual"
    body: tuple[AnyInner, ...] = Field(min_length=1)
    shortcut: tuple[AnyInner, ...] = ()


Layer = Inner | ResidualBlock
Table = Sequence[Layer]


def _check_table(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Refuse an empty or too long table, and two layers of one name beside each other."""
    count = sum(1 + _inside(layer) for layer in layers)
    if not 0 < count <= MAX_LAYERS:
        raise ValueError(
            f"model.layers has {count} layers, blocks included; it must have 1 to {MAX_LAYERS}"
        )
    parts = [
        part
        for one in layers
        if isinstance(one, ResidualBlock)
        for part in (one.body, one.shortcut)
    ]
    for table in (layers, *parts):
        names = Counter(layer.name for layer in table if layer.name is not None)
        if twice := [name for name, times in names.items() if times > 1]:
            raise ValueError(f"model.layers has two layers called {twice[0]!r}; rename one of them")
    return layers


def _inside(layer: Layer) -> int:
    return len(layer.body) + len(layer.shortcut) if isinstance(layer, ResidualBlock) else 0


Layers = Annotated[
    tuple[Annotated[Layer, Field(discriminator="kind")], ...], AfterValidator(_check_table)
]
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
