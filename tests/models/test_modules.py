"""Tables as modules and back: the same function, whatever the layers."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch import Tensor, nn

from semisfl.models import split as models
from semisfl.models.layers import Layers, Residual
from semisfl.models.modules import layers_of, modules_of
from semisfl.models.shapes import place
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
from tests.twin import plain

SHAPE, CLASSES = (2, 10, 10), 3
small = st.integers(1, 3)
convs = st.builds(
    Conv,
    channels=st.sampled_from([2, 4, 6]),
    kernel=small,
    stride=st.integers(1, 2),
    padding=st.integers(0, 2),
    bias=st.booleans(),
    groups=st.integers(1, 2),
)
pools = st.builds(Pool, size=small, stride=st.none() | small, padding=st.integers(0, 1))
averages = st.builds(AveragePool, size=st.none() | small, stride=st.none() | small)
norms = st.sampled_from([BatchNorm(), BatchNorm(), GroupNorm(groups=2), LayerNorm()])
others = st.one_of(norms, st.sampled_from([Relu(), Relu(), Gelu(), Drop(p=0.3)]))
inner = st.one_of(convs, pools, others)


@st.composite
def residuals(draw: st.DrawFn) -> ResidualBlock:
    """The shortcut makes up for what the body does to the shape: both end in the same convolution."""
    body = [layer for layer in draw(st.lists(inner, max_size=4)) if keeps_sides(layer)]
    end = draw(convs).model_copy(update={"groups": 1})
    shortcut = draw(st.sampled_from([(end,), (end, BatchNorm()), (end, Relu())]))
    return ResidualBlock(body=(*body, end, *shortcut[1:]), shortcut=shortcut)


def keeps_sides(layer: Layer) -> bool:
    return isinstance(layer, BatchNorm | GroupNorm | LayerNorm | Relu | Gelu | Drop)


@st.composite
def tables(draw: st.DrawFn) -> list[Layer]:
    """Layers that fit each other: one that would not is left out."""
    layers: list[Layer] = []
    head: list[Layer] = [Flatten(), BatchNorm(), Linear(features=4), LayerNorm(), Relu(), Linear()]
    for layer in draw(st.lists(st.one_of(inner, averages, residuals()), max_size=7)):
        try:
            place([*layers, layer, *head], SHAPE, CLASSES)
        except ValueError:
            continue
        layers.append(layer)
    return [*layers, *head]


def state_shapes(module: nn.Module) -> dict[str, Any]:
    return {key: (value.shape, value.dtype) for key, value in module.state_dict().items()}


def without_dropout(module: nn.Module) -> nn.Module:
    for layer in module.modules():
        if hasattr(layer, "p"):
            layer.p = 0.0
    return module


def gradients(module: nn.Module, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    out = module(images)
    out.square().sum().backward()
    return out, {key: value.grad for key, value in module.named_parameters()}  # type: ignore[misc]


@settings(max_examples=60, deadline=None)
@given(tables())
def test_a_table_becomes_a_module_and_a_table_again(table: list[Layer]) -> None:
    module = modules_of(table, SHAPE, CLASSES)
    written = parse_layers(layers_of(module))
    again = modules_of(written, SHAPE, CLASSES)
    assert state_shapes(again) == state_shapes(module)
    assert layers_of(again) == layers_of(module)
    again.load_state_dict(module.state_dict())
    images = torch.randn(5, *SHAPE)
    assert torch.equal(again.eval()(images), module.eval()(images))


IN_A_BLOCK = ResidualBlock(
    body=(Conv(channels=4, padding=1), Relu(), Pool(), Conv(channels=4, padding=1), Relu()),
    shortcut=(Conv(channels=4, kernel=1, stride=2), BatchNorm()),
)


@settings(max_examples=60, deadline=None)
@given(tables())
@example([Conv(channels=2), Relu(), Pool(), IN_A_BLOCK, Relu(), Flatten(), Linear()])
def test_merged_layers_compute_what_single_ones_do(table: list[Layer]) -> None:
    """Convolution, ReLU and pooling as one, at the top and inside residual blocks, with their gradients."""
    merged = without_dropout(modules_of(table, SHAPE, CLASSES)).double().train()
    single = plain(copy.deepcopy(merged))
    assert not any(isinstance(layer, Layers) for layer in single.modules())
    images = torch.randn(5, *SHAPE, dtype=torch.double)
    (result, ours), (expected, theirs) = gradients(merged, images), gradients(single, images)
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-9)
    assert ours.keys() == theirs.keys()
    for key, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[key], rtol=1e-5, atol=1e-8)


@settings(max_examples=60, deadline=None)
@given(tables())
def test_sizes_by_arithmetic_are_pytorchs(table: list[Layer]) -> None:
    x = torch.zeros(2, *SHAPE)
    module = modules_of(table, SHAPE, CLASSES).eval()
    for row, layer in zip(place(table, SHAPE, CLASSES), module, strict=True):
        x = layer(x)
        assert tuple(x.shape[1:]) == row.gives
        assert models.parameter_count(layer) == row.parameters


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Conv2d(1, 1, 3, padding="same"), "has padding = 'same'; give it in pixels"),
        (nn.Conv2d(1, 1, 3, dilation=2), "has dilation = (2, 2); in a table it is always 1"),
        (nn.Conv2d(1, 1, 3, padding_mode="reflect"), "padding_mode = 'reflect'"),
        (nn.BatchNorm1d(1, affine=False), "has affine = False"),
        (nn.MaxPool2d(2, ceil_mode=True), "has ceil_mode = True"),
        (nn.AvgPool2d(2, padding=1), "has padding = 1; in a table it is always 0"),
        (nn.AdaptiveAvgPool2d(2), "has output_size = 2; in a table it is always 1"),
        (nn.Flatten(2), "has start_dim = 2; in a table it is always 1"),
        (nn.Dropout(1.0), "p = 1.0: should be less than 1"),
        (nn.Softmax(1), "layer '1' is a Softmax, which a table cannot describe; it can: Conv2d,"),
        (Residual(nn.Sequential(nn.Tanh())), "layer '1' (Residual) layer '0' is a Tanh"),
        (nn.GroupNorm(1, 1, eps=1e-6), "has eps = 1e-06; in a table it is always 1e-05"),
        (nn.LayerNorm([4, 4]), "normalized_shape = (4, 4) and bias = True; in a table it"),
        (
            nn.LayerNorm(8),
            "layer '1' (LayerNorm) comes before a Flatten; in a table it is given flat",
        ),
        (Residual(nn.Sequential(nn.Linear(8, 8))), "layer '0' (Linear) comes before a Flatten"),
        (nn.GELU("tanh"), "has approximate = 'tanh'; in a table it is always 'none'"),
    ],
)
def test_layers_that_a_table_cannot_describe_are_named(layer: nn.Module, message: str) -> None:
    with pytest.raises(ValueError) as error:
        layers_of(nn.Sequential(nn.ReLU(), layer))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_features_are_flat_after_a_flatten_also_in_a_block() -> None:
    block = Residual(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)))
    rows = layers_of(nn.Sequential(nn.Flatten(), nn.LayerNorm(8), block))
    assert [row["kind"] for row in rows] == ["flatten", "layernorm", "residual"]
    body = Residual(nn.Sequential(nn.Flatten()), nn.Sequential(nn.Flatten()))
    assert layers_of(nn.Sequential(body, nn.LayerNorm(8)))[1]["kind"] == "layernorm"


def test_a_layer_used_twice() -> None:
    """One without weights is there twice; one with weights would be two in a table."""
    relu, linear = nn.ReLU(), nn.Linear(4, 4)
    assert [row["name"] for row in layers_of(nn.Sequential(relu, nn.Flatten(), relu))] == [*"012"]
    with pytest.raises(ValueError, match="a layer with weights is used twice"):
        layers_of(nn.Sequential(nn.Flatten(), linear, relu, linear))


def test_body_and_shortcut_read_the_same_input() -> None:
    block = Residual(nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(2, 2, 1, bias=False)))
    x = torch.randn(3, 2, 4, 4)
    expected = x + nn.functional.conv2d(x.relu(), block.body[1].weight)
    torch.testing.assert_close(block(x.clone()), expected)
