"""The kinds of layers of a model that is written as a table, with their settings and limits. Loads no torch.

A table is a list of layers like ``{kind = "conv", channels = 32}``. The shape of a layer's input follows
from the layers before it; settings that are left out are PyTorch's. A server sends its table to
devices that never saw it, so everything in it has a limit.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)
from pydantic_core import PydanticCustomError

from semisfl.settings.mistakes import one_line

MAX_LAYERS = 256
"""Most layers of a whole table, those inside residual blocks included."""
MAX_WIDTH = 65_536
MAX_SIDE = 64


def _layer_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,40}", name):
        raise PydanticCustomError("name", "Input must be letters, digits, - and _, at most 40")
    return name


class LayerBase(BaseModel):
    """The fields of every layer. Layers are written out without settings that have their default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str
    name: Annotated[str, AfterValidator(_layer_name)] | None = None

    @model_serializer(mode="wrap")
    def _brief(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {
            key: value
            for key, value in serialize(self).items()
            if key == "kind" or getattr(self, key) != type(self).model_fields[key].default
        }


class Conv(LayerBase):
    kind: Literal["conv"] = "conv"
    channels: int = Field(ge=1, le=MAX_WIDTH)
    kernel: int = Field(3, ge=1, le=MAX_SIDE)
    stride: int = Field(1, ge=1, le=MAX_SIDE)
    padding: int = Field(0, ge=0, le=MAX_SIDE)
    bias: bool = True
    groups: int = Field(1, ge=1, le=MAX_WIDTH)


class BatchNorm(LayerBase):
    kind: Literal["batchnorm"] = "batchnorm"


class GroupNorm(LayerBase):
    """Normalise the channels of one image in ``groups``; it does not look at other images."""

    kind: Literal["groupnorm"] = "groupnorm"
    groups: int = Field(ge=1, le=MAX_WIDTH)


class LayerNorm(LayerBase):
    """Normalise all values of one image, as ``nn.LayerNorm`` of the whole shape does."""

    kind: Literal["layernorm"] = "layernorm"


class Relu(LayerBase):
    kind: Literal["relu"] = "relu"


class Gelu(LayerBase):
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
    kind: Literal["dropout"] = "dropout"
    p: float = Field(0.5, ge=0, lt=1)


class Flatten(LayerBase):
    kind: Literal["flatten"] = "flatten"


class Linear(LayerBase):
    """``features`` none, for the last one: as many as there are classes."""

    kind: Literal["linear"] = "linear"
    features: int | None = Field(None, ge=1, le=MAX_WIDTH)
    bias: bool = True


Norm = BatchNorm | GroupNorm | LayerNorm
Inner = Conv | Norm | Relu | Gelu | Pool | AveragePool | Drop | Flatten | Linear


class ResidualBlock(LayerBase):
    """body(x) + shortcut(x); an empty shortcut is x itself."""

    kind: Literal["residual"] = "residual"
    body: tuple[Inner, ...] = Field(min_length=1)
    shortcut: tuple[Inner, ...] = ()


Layer = Inner | ResidualBlock
Table = Sequence[Layer]

INNER_KINDS: dict[str, type[Layer]] = {
    kind.model_fields["kind"].default: kind for kind in get_args(Inner)
}
KINDS: dict[str, type[Layer]] = {**INNER_KINDS, "residual": ResidualBlock}


def parse_layers(values: Any) -> tuple[Layer, ...]:
    """Return a checked table from plain values; a mistake is one line that names its place."""
    layers = _parse(values, "model.layers", KINDS)
    if not layers:
        raise ValueError(
            "model.layers is empty; give it layers, or leave it out and set model.name"
        )
    count = sum(1 + _inside(layer) for layer in layers)
    if count > MAX_LAYERS:
        raise ValueError(f"model.layers has {count} layers, blocks included; at most {MAX_LAYERS}")
    return layers


def named(layers: Sequence[Layer]) -> list[tuple[str, Layer]]:
    """Return every layer with a name; one without is named after its kind, with a number."""
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


def _inside(layer: Layer) -> int:
    return len(layer.body) + len(layer.shortcut) if isinstance(layer, ResidualBlock) else 0


def _parse(values: Any, where: str, kinds: dict[str, type[Layer]]) -> tuple[Any, ...]:
    if not isinstance(values, list | tuple):
        raise ValueError(
            f'{where} = {values!r:.60} is not a list of layers, e.g. [{{kind = "conv", channels = 32}}]'
        )
    if len(values) > MAX_LAYERS:
        raise ValueError(f"{where} has {len(values)} layers; at most {MAX_LAYERS}")
    layers = [_parse_layer(one, f"{where}[{index}]", kinds) for index, one in enumerate(values)]
    names: dict[str, int] = {}
    for index, layer in enumerate(layers):
        if layer.name is None:
            continue
        if layer.name in names:
            raise ValueError(
                f"{where}[{index}].name = {layer.name!r} is the name of {where}[{names[layer.name]}] "
                "too; choose another"
            )
        names[layer.name] = index
    return tuple(layers)


def _parse_layer(values: Any, where: str, kinds: dict[str, type[Layer]]) -> Layer:
    if isinstance(values, LayerBase):
        values = values.model_dump()
    if not isinstance(values, dict) or "kind" not in values:
        raise ValueError(f"{where} has no kind; use one of {', '.join(kinds)}")
    kind = values["kind"]
    if kind == "residual" and "residual" not in kinds:
        raise ValueError(
            f"{where} is a residual block inside another; put them one after the other"
        )
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"{where}.kind = {kind!r:.60} is not known; use one of {', '.join(kinds)}")
    if kind == "residual":
        values = values | {
            key: _parse(values[key], f"{where}.{key}", INNER_KINDS)
            for key in ("body", "shortcut")
            if key in values
        }
    try:
        return kinds[kind].model_validate(values)
    except ValidationError as error:
        keys = list(kinds[kind].model_fields)
        raise ValueError(one_line(error, kinds[kind], keys, f"{where}.")) from error
