"""Convert layer tables to PyTorch modules, and modules of known layers to tables.

A table is what a configuration and a server's terms hold of a model; modules are what is trained.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from semisfl.models.layers import Dropout, Layers, Residual, named_layers
from semisfl.models.shapes import Placed, Shape, place
from semisfl.settings.layer_kinds import (
    AveragePool,
    BatchNorm,
    Conv,
    Drop,
    Flatten,
    Gelu,
    GroupNorm,
    Layer,
    LayerNorm,
    Linear,
    Pool,
    Relu,
    ResidualBlock,
    parse_layers,
)

# Attributes of every module; `weights` is the one that `engine.weights` sets.
RESERVED = {*dir(Layers()), "weights"}


def modules_of(layers: Sequence[Layer], shape: Shape, classes: int) -> Layers:
    """Return the model that a table describes, with PyTorch's initial weights.

    ``shape``: channels, height and width of an image. Raises ValueError if a layer does not fit its input, or has a
    name that every module uses.
    """
    return _modules(place(layers, shape, classes))


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


def _conv(layer: Conv, at: Placed) -> nn.Module:
    return nn.Conv2d(
        at.takes[0],
        layer.channels,
        layer.kernel,
        layer.stride,
        layer.padding,
        groups=layer.groups,
        bias=layer.bias,
    )


def _batchnorm(layer: BatchNorm, at: Placed) -> nn.Module:
    """Return BatchNorm for pictures or for flat features, whichever it is given."""
    return (nn.BatchNorm2d if len(at.takes) == 3 else nn.BatchNorm1d)(at.takes[0])


def _average_pool(layer: AveragePool, at: Placed) -> nn.Module:
    """Return a mean over squares, or over the whole picture if the layer has no size."""
    if layer.size is None:
        return nn.AdaptiveAvgPool2d(1)
    return nn.AvgPool2d(layer.size, layer.stride)


MAKERS: dict[type[Layer], Callable[[Any, Placed], nn.Module]] = {
    Conv: _conv,
    BatchNorm: _batchnorm,
    GroupNorm: lambda layer, at: nn.GroupNorm(layer.groups, at.takes[0]),
    LayerNorm: lambda layer, at: nn.LayerNorm(at.takes),
    Relu: lambda layer, at: nn.ReLU(),
    Gelu: lambda layer, at: nn.GELU(),
    Pool: lambda layer, at: nn.MaxPool2d(layer.size, layer.stride, layer.padding),
    AveragePool: _average_pool,
    Drop: lambda layer, at: Dropout(layer.p),
    Flatten: lambda layer, at: nn.Flatten(),
    Linear: lambda layer, at: nn.Linear(at.takes[0], at.gives[0], bias=layer.bias),
    ResidualBlock: lambda layer, at: Residual(_modules(at.body), _modules(at.shortcut)),
}


# --- and back --------------------------------------------------------------------------------------


def layers_of(model: nn.Sequential) -> list[dict[str, Any]]:
    """Return ``model`` as a table for ``model.layers``, which holds no weights.

    Raises ValueError with the name of a layer that a table cannot describe: another kind, a setting that tables do
    not have, or weights that two layers share.
    """
    rows = _rows(model)
    shared = sum(1 for _ in model.parameters()) != sum(
        1 for _ in model.named_parameters(remove_duplicate=False)
    )
    if shared:
        raise ValueError("a layer with weights is used twice; a table would make two of it")
    return [layer.model_dump(mode="json") for layer in parse_layers(rows)]


def _rows(model: nn.Sequential, flat: bool = False) -> list[dict[str, Any]]:
    """Return the rows of the layers; ``flat``: what they are given has been flattened."""
    rows = []
    for name, layer in named_layers(model):
        write = WRITERS.get(type(layer))
        if write is None:
            known = ", ".join(kind.__name__ for kind in WRITERS)
            raise ValueError(
                f"layer {name!r} is a {type(layer).__name__}, which a table cannot describe; it can: {known}"
            )
        try:
            if not flat:
                _refuse_last_axis(layer)
            _refuse_unusual(layer)
            rows.append({"name": name, **write(layer, flat)})
        except ValueError as error:
            raise ValueError(f"layer {name!r} ({type(layer).__name__}) {error}") from error
        flat = flat or any(isinstance(inner, nn.Flatten) for inner in layer.modules())
    return rows


def _refuse_last_axis(layer: nn.Module) -> None:
    """Refuse layers that PyTorch applies along the width of a picture; in a table they take all of its values."""
    norm = isinstance(layer, nn.LayerNorm) and len(layer.normalized_shape) == 1
    if norm or isinstance(layer, nn.Linear):
        raise ValueError("comes before a Flatten; in a table it is given flat features")


def _number(layer: Any, key: str) -> int:
    """Return the single value of a setting that PyTorch keeps per side; refuse different ones."""
    value = getattr(layer, key)
    sides = value if isinstance(value, tuple) else (value,)
    if len(set(sides)) != 1 or not isinstance(sides[0], int):
        raise ValueError(f"has {key} = {value!r}; a table has one number for it")
    return int(sides[0])


BATCHNORM = {"eps": 1e-5, "momentum": 0.1, "affine": True, "track_running_stats": True}
USUAL: dict[type[nn.Module], dict[str, Any]] = {
    nn.Conv2d: {"dilation": 1, "padding_mode": "zeros"},
    nn.BatchNorm2d: BATCHNORM,
    nn.BatchNorm1d: BATCHNORM,
    nn.GroupNorm: {"eps": 1e-5, "affine": True},
    nn.LayerNorm: {"eps": 1e-5, "elementwise_affine": True},
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


def _conv_row(layer: nn.Conv2d, flat: bool) -> dict[str, Any]:
    return {
        "kind": "conv",
        "channels": layer.out_channels,
        "kernel": _number(layer, "kernel_size"),
        "stride": _number(layer, "stride"),
        "padding": _number(layer, "padding"),
        "bias": layer.bias is not None,
        "groups": layer.groups,
    }


def _layernorm_row(layer: nn.LayerNorm, flat: bool) -> dict[str, Any]:
    """Write a LayerNorm of all values of an image, with scale and offset: a table has no other kind."""
    if len(layer.normalized_shape) not in (1, 3) or layer.bias is None:
        raise ValueError(
            f"has normalized_shape = {layer.normalized_shape} and bias = {layer.bias is not None}; in a table "
            "it normalises flat features, or channels, height and width, with a bias"
        )
    return {"kind": "layernorm"}


def _squares(layer: nn.Module) -> dict[str, Any]:
    """Return size and stride of a pooling layer; a stride equal to the size is left out."""
    size, stride = _number(layer, "kernel_size"), _number(layer, "stride")
    return {"size": size} if stride == size else {"size": size, "stride": stride}


def _residual_row(layer: Residual, flat: bool) -> dict[str, Any]:
    body, shortcut = _rows(layer.body, flat), _rows(layer.shortcut, flat)
    return {"kind": "residual", "body": body, "shortcut": shortcut}


def _linear_row(layer: nn.Linear, flat: bool) -> dict[str, Any]:
    return {"kind": "linear", "features": layer.out_features, "bias": layer.bias is not None}


def _pool_row(layer: nn.MaxPool2d, flat: bool) -> dict[str, Any]:
    return {"kind": "pool", "padding": _number(layer, "padding"), **_squares(layer)}


WRITERS: dict[type[nn.Module], Callable[[Any, bool], dict[str, Any]]] = {
    nn.Conv2d: _conv_row,
    nn.BatchNorm2d: lambda layer, flat: {"kind": "batchnorm"},
    nn.BatchNorm1d: lambda layer, flat: {"kind": "batchnorm"},
    nn.GroupNorm: lambda layer, flat: {"kind": "groupnorm", "groups": layer.num_groups},
    nn.LayerNorm: _layernorm_row,
    nn.ReLU: lambda layer, flat: {"kind": "relu"},
    nn.GELU: lambda layer, flat: {"kind": "gelu"},
    nn.MaxPool2d: _pool_row,
    nn.AvgPool2d: lambda layer, flat: {"kind": "avgpool", **_squares(layer)},
    nn.AdaptiveAvgPool2d: lambda layer, flat: {"kind": "avgpool"},
    nn.Dropout: lambda layer, flat: {"kind": "dropout", "p": layer.p},
    Dropout: lambda layer, flat: {"kind": "dropout", "p": layer.p},
    nn.Flatten: lambda layer, flat: {"kind": "flatten"},
    nn.Linear: _linear_row,
    Residual: _residual_row,
}
"""Write a layer's row; ``flat``: what it is given has been flattened."""
