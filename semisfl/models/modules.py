"""Convert layer tables to PyTorch modules, and modules of known layers to tables.

A table is what a configuration and a server's terms hold of a model; modules are what is trained.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import nn

from semisfl.models import layers
from semisfl.models.layers import Dropout, Layers, Residual, named_layers
from semisfl.models.shapes import Placed, Shape, columns, margins, normalised, pair, place
from semisfl.settings import layer_kinds as kinds
from semisfl.settings.layer_kinds import Layer, parse_layers

# Attributes of every module; `weights` is the one that `engine.weights` sets.
RESERVED = {*dir(Layers()), "weights"}


def modules_of(table: Sequence[Layer], shape: Shape, classes: int, *, whole: bool = True) -> Layers:
    """Return the model that a table describes, with PyTorch's initial weights.

    ``shape``: channels, height and width of an image; ``whole``: what `place` takes. Raises ValueError if a layer does
    not fit its input, or has a name that every module uses.
    """
    return _modules(place(table, shape, classes, whole=whole))


def _modules(placed: Sequence[Placed]) -> Layers:
    """Return placed layers as one module. A name must not hide an attribute that every PyTorch module has."""
    for one in placed:
        if one.name in RESERVED:
            raise ValueError(
                f"a layer cannot be called {one.name!r}, which every PyTorch module has already; "
                "choose another name"
            )
    return Layers(
        OrderedDict((one.name, MAKERS[type(one.layer)](one.layer, one)) for one in placed)
    )


def _conv(layer: kinds.Conv, at: Placed) -> nn.Module:
    """Return a convolution; PyTorch's own cannot have other margins left than right."""
    left, right, above, below = around = margins(layer, at.takes)
    arguments = (at.takes[0], layer.channels, pair(layer.kernel), pair(layer.stride))
    more: dict[str, Any] = {"groups": layer.groups, "bias": layer.bias}
    if (left, above) != (right, below):
        return layers.PaddedConv(*arguments, margins=around, **more)
    return nn.Conv2d(*arguments, (above, left), **more)


def _batchnorm(layer: kinds.BatchNorm, at: Placed) -> nn.Module:
    """Return BatchNorm for pictures or for flat features, whichever it is given."""
    kind = nn.BatchNorm2d if len(at.takes) == 3 else nn.BatchNorm1d
    return (layers.NORMS[kind] if layer.stored else kind)(at.takes[0], layer.eps, layer.momentum)


def _layernorm(layer: kinds.LayerNorm, at: Placed) -> nn.Module:
    """Return LayerNorm of a whole image, of each token, or of the channels at each position of a picture."""
    per_position = layer.per_position and len(at.takes) == 3
    kind = layers.PositionNorm if per_position else nn.LayerNorm
    return kind(normalised(layer, at.takes), layer.eps)


def _average_pool(layer: kinds.AveragePool, at: Placed) -> nn.Module:
    """Return a mean over windows, or over the whole picture if the layer has no size."""
    if layer.size is None:
        return nn.AdaptiveAvgPool2d(1)
    return nn.AvgPool2d(layer.size, layer.stride)


# One maker per kind of layer; `WRITERS` below has one writer per class of module, and the two are inverse.
MAKERS: dict[type[Layer], Callable[[Any, Placed], nn.Module]] = {
    kinds.Conv: _conv,
    kinds.BatchNorm: _batchnorm,
    kinds.GroupNorm: lambda layer, at: nn.GroupNorm(layer.groups, at.takes[0]),
    kinds.LayerNorm: _layernorm,
    kinds.Relu: lambda layer, at: nn.ReLU(),
    kinds.Relu6: lambda layer, at: nn.ReLU6(),
    kinds.Gelu: lambda layer, at: nn.GELU(),
    kinds.Silu: lambda layer, at: nn.SiLU(),
    kinds.Hardswish: lambda layer, at: nn.Hardswish(),
    kinds.Hardsigmoid: lambda layer, at: nn.Hardsigmoid(),
    kinds.Sigmoid: lambda layer, at: nn.Sigmoid(),
    kinds.Scale: lambda layer, at: layers.Scale(columns(at.takes), layer.start),
    kinds.Pool: lambda layer, at: nn.MaxPool2d(layer.size, layer.stride, layer.padding),
    kinds.AveragePool: _average_pool,
    kinds.Drop: lambda layer, at: Dropout(layer.p),
    kinds.Flatten: lambda layer, at: nn.Flatten(),
    kinds.Linear: lambda layer, at: nn.Linear(at.takes[-1], at.gives[-1], bias=layer.bias),
    kinds.Tokens: lambda layer, at: layers.Tokens(),
    kinds.ClassToken: lambda layer, at: layers.ClassToken(at.takes[1]),
    kinds.Positions: lambda layer, at: layers.Positions(*at.takes),
    kinds.Attention: lambda layer, at: layers.Attention(at.takes[1], layer.heads, layer.bias),
    kinds.FirstToken: lambda layer, at: layers.FirstToken(),
    kinds.Block: lambda layer, at: _modules(at.body),
    kinds.ResidualBlock: lambda layer, at: Residual(_modules(at.body), _modules(at.shortcut)),
    kinds.Gate: lambda layer, at: layers.Gate(_modules(at.body)),
}


# --- and back --------------------------------------------------------------------------------------


def layers_of(model: nn.Sequential) -> list[dict[str, Any]]:
    """Return ``model`` as a table for ``model.layers``, which holds no weights.

    Raises ValueError with the name of a layer that a table cannot describe: another kind, a setting that tables do
    not have, or weights that two layers share.
    """
    rows = _rows(model)
    # `named_parameters` counts a parameter once per place, `parameters` once.
    shared = sum(1 for _ in model.parameters()) != sum(
        1 for _ in model.named_parameters(remove_duplicate=False)
    )
    if shared:
        raise ValueError("a layer with weights is used twice; a table would make two of it")
    return [layer.model_dump(mode="json") for layer in parse_layers(rows)]


Flow = Literal["picture", "tokens", "flat"]
"""What a layer is given for an image."""
# Layers after which something else flows. What flows decides what a layer means: PyTorch applies a linear layer to
# the last axis of anything, a table only to flat features and tokens.
FLOWS: dict[type[nn.Module], Flow] = {
    nn.Flatten: "flat",
    layers.FirstToken: "flat",
    layers.Tokens: "tokens",
}


def _rows(model: nn.Sequential, flow: Flow = "picture") -> list[dict[str, Any]]:
    """Return the rows of the layers of ``model``, which is given ``flow``."""
    rows = []
    for name, layer in named_layers(model):
        write = WRITERS.get(type(layer))
        if write is None:
            known = ", ".join(kind.__name__ for kind in WRITERS)
            raise ValueError(
                f"layer {name!r} is a {type(layer).__name__}, which a table cannot describe; it can: {known}"
            )
        try:
            if flow == "picture":
                _refuse_last_axis(layer)
            _refuse_unusual(layer)
            rows.append({"name": name, **write(layer, flow)})
        except ValueError as error:
            raise ValueError(f"layer {name!r} ({type(layer).__name__}) {error}") from error
        for inner in layer.modules():
            flow = FLOWS.get(type(inner), flow)
    return rows


def _refuse_last_axis(layer: nn.Module) -> None:
    """Refuse layers that PyTorch applies along the width of a picture; in a table they take all of its values."""
    norm = type(layer) is nn.LayerNorm and len(layer.normalized_shape) == 1
    if norm or isinstance(layer, nn.Linear):
        raise ValueError("comes before a Flatten; in a table it is given flat features or tokens")


def _sides(layer: Any, key: str) -> int | list[int]:
    """Return a setting that PyTorch keeps per side: one number where both sides have the same."""
    value = getattr(layer, key)
    first, second = value if isinstance(value, tuple) else (value, value)
    return int(first) if first == second else [int(first), int(second)]


BATCHNORM = {"affine": True, "track_running_stats": True}
USUAL: dict[type[nn.Module], dict[str, Any]] = {
    nn.Conv2d: {"dilation": 1, "padding_mode": "zeros"},
    nn.BatchNorm2d: BATCHNORM,
    nn.BatchNorm1d: BATCHNORM,
    nn.GroupNorm: {"eps": 1e-5, "affine": True},
    nn.LayerNorm: {"elementwise_affine": True},
    nn.GELU: {"approximate": "none"},
    nn.MaxPool2d: {"dilation": 1, "ceil_mode": False, "return_indices": False},
    nn.AvgPool2d: {"padding": 0, "ceil_mode": False, "divisor_override": None},
    nn.AdaptiveAvgPool2d: {"output_size": 1},
    nn.Flatten: {"start_dim": 1, "end_dim": -1},
}
"""Settings that a layer of a table always has: a table has no column for them."""


def _refuse_unusual(layer: nn.Module) -> None:
    """Raise ValueError for a setting that a table has no key for, where it differs from what a table always means."""
    for key, usual in USUAL.get(type(layer), {}).items():
        value = getattr(layer, key)
        if value not in (usual, (usual, usual)):
            raise ValueError(f"has {key} = {value!r}; in a table it is always {usual!r}")


def _conv_row(layer: nn.Conv2d, flow: Flow) -> dict[str, Any]:
    """Write a convolution; ``padding`` is a number, a pair or the four margins."""
    if isinstance(layer.padding, str):
        raise ValueError(f"has padding = {layer.padding!r}; give it in pixels")
    padding = _sides(layer, "padding")
    if isinstance(layer, layers.PaddedConv):
        padding = list(layer.margins)
    return {
        "kind": "conv",
        "channels": layer.out_channels,
        "kernel": _sides(layer, "kernel_size"),
        "stride": _sides(layer, "stride"),
        "padding": padding,
        "bias": layer.bias is not None,
        "groups": layer.groups,
    }


def _batchnorm_row(layer: nn.BatchNorm2d | nn.BatchNorm1d, flow: Flow) -> dict[str, Any]:
    row = {"kind": "batchnorm", "eps": layer.eps, "momentum": layer.momentum}
    return row | ({"stored": True} if type(layer) in layers.NORMS.values() else {})


def _layernorm_row(layer: nn.LayerNorm, flow: Flow) -> dict[str, Any]:
    """Write a LayerNorm with scale and offset: a table has no other kind."""
    if len(layer.normalized_shape) not in (1, 3) or layer.bias is None:
        raise ValueError(
            f"has normalized_shape = {layer.normalized_shape} and bias = {layer.bias is not None}; in a table "
            "it normalises flat features, tokens, or channels, height and width, with a bias"
        )
    per_position = isinstance(layer, layers.PositionNorm)
    return {"kind": "layernorm", "eps": layer.eps, "per_position": per_position}


def _window_row(kind: str, layer: nn.Module) -> dict[str, Any]:
    """Write a pooling layer; a stride equal to the size is left out."""
    size, stride = _sides(layer, "kernel_size"), _sides(layer, "stride")
    return {"kind": kind, "size": size} | ({} if stride == size else {"stride": stride})


def _residual_row(layer: Residual, flow: Flow) -> dict[str, Any]:
    """Write a residual block with the rows of its layers."""
    rows = {"body": _rows(layer.body, flow), "shortcut": _rows(layer.shortcut, flow)}
    return {"kind": "residual", **rows}


def _plain(kind: str) -> Callable[[Any, Flow], dict[str, Any]]:
    """Return the writer of a layer without settings."""
    return lambda layer, flow: {"kind": kind}


WRITERS: dict[type[nn.Module], Callable[[Any, Flow], dict[str, Any]]] = {
    nn.Conv2d: _conv_row,
    layers.PaddedConv: _conv_row,
    nn.BatchNorm2d: _batchnorm_row,
    nn.BatchNorm1d: _batchnorm_row,
    layers.StoredNorm2d: _batchnorm_row,
    layers.StoredNorm1d: _batchnorm_row,
    nn.GroupNorm: lambda layer, flow: {"kind": "groupnorm", "groups": layer.num_groups},
    nn.LayerNorm: _layernorm_row,
    layers.PositionNorm: _layernorm_row,
    nn.ReLU: _plain("relu"),
    nn.ReLU6: _plain("relu6"),
    nn.GELU: _plain("gelu"),
    nn.SiLU: _plain("silu"),
    nn.Hardswish: _plain("hardswish"),
    nn.Hardsigmoid: _plain("hardsigmoid"),
    nn.Sigmoid: _plain("sigmoid"),
    layers.Scale: lambda layer, flow: {"kind": "scale", "start": layer.start},
    nn.MaxPool2d: lambda layer, flow: {
        **_window_row("pool", layer),
        "padding": _sides(layer, "padding"),
    },
    nn.AvgPool2d: lambda layer, flow: _window_row("avgpool", layer),
    nn.AdaptiveAvgPool2d: _plain("avgpool"),
    nn.Dropout: lambda layer, flow: {"kind": "dropout", "p": layer.p},
    Dropout: lambda layer, flow: {"kind": "dropout", "p": layer.p},
    nn.Flatten: _plain("flatten"),
    # The numbers of inputs follow from the layer before.
    nn.Linear: lambda layer, flow: {
        "kind": "linear",
        "features": layer.out_features,
        "bias": layer.bias is not None,
    },
    layers.Tokens: _plain("tokens"),
    layers.ClassToken: _plain("classtoken"),
    layers.Positions: _plain("positions"),
    layers.Attention: lambda layer, flow: {
        "kind": "attention",
        "heads": layer.heads,
        "bias": layer.qkv.bias is not None,
    },
    layers.FirstToken: _plain("firsttoken"),
    # A sequence inside the model is a block, which cannot be cut.
    Layers: lambda layer, flow: {"kind": "block", "body": _rows(layer, flow)},
    nn.Sequential: lambda layer, flow: {"kind": "block", "body": _rows(layer, flow)},
    Residual: _residual_row,
    layers.Gate: lambda layer, flow: {"kind": "gate", "body": _rows(layer.body, flow)},
}
"""Write a layer's row, from the layer and what it is given."""
