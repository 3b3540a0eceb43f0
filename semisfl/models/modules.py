"""Convert layer tables to PyTorch modules, and modules of known layers to tables."""

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
    """Return the model that a table describes, with PyTorch's initial weights."""
    return _modules(place(layers, shape, classes))


def _modules(placed: Sequence[Placed]) -> Layers:
    for layer in placed:
        if layer.name in RESERVED:
            raise ValueError(
                f"a layer cannot be called {layer.name!r}, which every PyTorch module has already; "
                "choose another name"
            )
    return Layers(OrderedDict((layer.name, MAKERS[type(layer.layer)](layer)) for layer in placed))


def _conv(placed: Placed) -> nn.Module:
    layer = placed.layer
    assert isinstance(layer, Conv)
    return nn.Conv2d(
        placed.takes[0],
        layer.channels,
        layer.kernel,
        layer.stride,
        layer.padding,
        groups=layer.groups,
        bias=layer.bias,
    )


def _batchnorm(placed: Placed) -> nn.Module:
    return (nn.BatchNorm2d if len(placed.takes) == 3 else nn.BatchNorm1d)(placed.takes[0])


def _groupnorm(placed: Placed) -> nn.Module:
    assert isinstance(placed.layer, GroupNorm)
    return nn.GroupNorm(placed.layer.groups, placed.takes[0])


def _pool(placed: Placed) -> nn.Module:
    layer = placed.layer
    assert isinstance(layer, Pool)
    return nn.MaxPool2d(layer.size, layer.stride, layer.padding)


def _average_pool(placed: Placed) -> nn.Module:
    layer = placed.layer
    assert isinstance(layer, AveragePool)
    if layer.size is None:
        return nn.AdaptiveAvgPool2d(1)
    return nn.AvgPool2d(layer.size, layer.stride)


def _dropout(placed: Placed) -> nn.Module:
    assert isinstance(placed.layer, Drop)
    return Dropout(placed.layer.p)


def _linear(placed: Placed) -> nn.Module:
    assert isinstance(placed.layer, Linear)
    return nn.Linear(placed.takes[0], placed.gives[0], bias=placed.layer.bias)


MAKERS: dict[type[Layer], Callable[[Placed], nn.Module]] = {
    Conv: _conv,
    BatchNorm: _batchnorm,
    GroupNorm: _groupnorm,
    LayerNorm: lambda placed: nn.LayerNorm(placed.takes),
    Relu: lambda _: nn.ReLU(),
    Gelu: lambda _: nn.GELU(),
    Pool: _pool,
    AveragePool: _average_pool,
    Drop: _dropout,
    Flatten: lambda _: nn.Flatten(),
    Linear: _linear,
    ResidualBlock: lambda placed: Residual(_modules(placed.body), _modules(placed.shortcut)),
}


# --- and back --------------------------------------------------------------------------------------


def layers_of(model: nn.Sequential) -> list[dict[str, Any]]:
    """Return ``model`` as a table for ``model.layers``; ``ValueError`` names a layer that a table cannot describe.

    The table holds no weights.
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
            row = _residual_row(layer, flat) if isinstance(layer, Residual) else write(layer)
            rows.append({"name": name, **row})
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


def _usual(layer: Any, **settings: Any) -> None:
    for key, usual in settings.items():
        value = getattr(layer, key)
        if value not in (usual, (usual, usual)):
            raise ValueError(f"has {key} = {value!r}; in a table it is always {usual!r}")


def _conv_row(layer: nn.Conv2d) -> dict[str, Any]:
    _usual(layer, dilation=1, padding_mode="zeros")
    return {
        "kind": "conv",
        "channels": layer.out_channels,
        "kernel": _number(layer, "kernel_size"),
        "stride": _number(layer, "stride"),
        "padding": _number(layer, "padding"),
        "bias": layer.bias is not None,
        "groups": layer.groups,
    }


def _batchnorm_row(layer: nn.Module) -> dict[str, Any]:
    _usual(layer, eps=1e-5, momentum=0.1, affine=True, track_running_stats=True)
    return {"kind": "batchnorm"}


def _groupnorm_row(layer: nn.GroupNorm) -> dict[str, Any]:
    _usual(layer, eps=1e-5, affine=True)
    return {"kind": "groupnorm", "groups": layer.num_groups}


def _layernorm_row(layer: nn.LayerNorm) -> dict[str, Any]:
    _usual(layer, eps=1e-5, elementwise_affine=True)
    if len(layer.normalized_shape) not in (1, 3) or layer.bias is None:
        raise ValueError(
            f"has normalized_shape = {layer.normalized_shape} and bias = {layer.bias is not None}; in a table "
            "it normalises flat features, or channels, height and width, with a bias"
        )
    return {"kind": "layernorm"}


def _gelu_row(layer: nn.GELU) -> dict[str, Any]:
    _usual(layer, approximate="none")
    return {"kind": "gelu"}


def _squares(layer: nn.Module) -> dict[str, Any]:
    size, stride = _number(layer, "kernel_size"), _number(layer, "stride")
    return {"size": size} if stride == size else {"size": size, "stride": stride}


def _pool_row(layer: nn.MaxPool2d) -> dict[str, Any]:
    _usual(layer, dilation=1, ceil_mode=False, return_indices=False)
    return {"kind": "pool", "padding": _number(layer, "padding"), **_squares(layer)}


def _average_pool_row(layer: nn.AvgPool2d) -> dict[str, Any]:
    _usual(layer, padding=0, ceil_mode=False, divisor_override=None)
    return {"kind": "avgpool", **_squares(layer)}


def _mean_row(layer: nn.AdaptiveAvgPool2d) -> dict[str, Any]:
    _usual(layer, output_size=1)
    return {"kind": "avgpool"}


def _flatten_row(layer: nn.Flatten) -> dict[str, Any]:
    _usual(layer, start_dim=1, end_dim=-1)
    return {"kind": "flatten"}


def _residual_row(layer: Residual, flat: bool = False) -> dict[str, Any]:
    body, shortcut = _rows(layer.body, flat), _rows(layer.shortcut, flat)
    return {"kind": "residual", "body": body, "shortcut": shortcut}


def _linear_row(layer: nn.Linear) -> dict[str, Any]:
    return {"kind": "linear", "features": layer.out_features, "bias": layer.bias is not None}


WRITERS: dict[type[nn.Module], Callable[[Any], dict[str, Any]]] = {
    nn.Conv2d: _conv_row,
    nn.BatchNorm2d: _batchnorm_row,
    nn.BatchNorm1d: _batchnorm_row,
    nn.GroupNorm: _groupnorm_row,
    nn.LayerNorm: _layernorm_row,
    nn.ReLU: lambda _: {"kind": "relu"},
    nn.GELU: _gelu_row,
    nn.MaxPool2d: _pool_row,
    nn.AvgPool2d: _average_pool_row,
    nn.AdaptiveAvgPool2d: _mean_row,
    nn.Dropout: lambda layer: {"kind": "dropout", "p": layer.p},
    Dropout: lambda layer: {"kind": "dropout", "p": layer.p},
    nn.Flatten: _flatten_row,
    nn.Linear: _linear_row,
    Residual: _residual_row,
}
