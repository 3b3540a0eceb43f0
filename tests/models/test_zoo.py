"""The models known by name against the same networks written out in plain PyTorch."""

from collections import OrderedDict
from collections.abc import Callable
from math import prod

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semisfl.models.build import build, uncut
from semisfl.models.layers import Dropout, cut_layers, named_layers
from semisfl.models.shapes import place
from semisfl.models.split import parameter_count
from semisfl.models.zoo import MODELS
from semisfl.settings import catalog

Layers = list[tuple[str, nn.Module]]


def cnn(size: int, classes: int) -> Layers:
    return [
        ("conv1", nn.Conv2d(3, 32, 5)),
        ("relu1", nn.ReLU()),
        ("pool1", nn.MaxPool2d(2)),
        ("conv2", nn.Conv2d(32, 64, 5)),
        ("relu2", nn.ReLU()),
        ("pool2", nn.MaxPool2d(2)),
        ("flatten", nn.Flatten()),
        ("fc1", nn.Linear(size, 512)),
        ("relu_fc1", nn.ReLU()),
        ("fc2", nn.Linear(512, classes)),
    ]


def alexnet(size: int, classes: int, kernels: tuple[int, ...] = (3,) * 5) -> Layers:
    layers: Layers = []
    channels = 3
    for number, (width, side) in enumerate(
        zip((64, 192, 384, 256, 256), kernels, strict=True), start=1
    ):
        layers.append((f"conv{number}", nn.Conv2d(channels, width, side, padding=side // 2)))
        layers.append((f"relu{number}", nn.ReLU()))
        if number in (1, 2, 5):
            layers.append((f"pool{number}", nn.MaxPool2d(2)))
        channels = width
    return [
        *layers,
        ("flatten", nn.Flatten()),
        ("drop1", nn.Dropout()),
        ("fc1", nn.Linear(size, 4096)),
        ("relu_fc1", nn.ReLU()),
        ("drop2", nn.Dropout()),
        ("fc2", nn.Linear(4096, 4096)),
        ("relu_fc2", nn.ReLU()),
        ("fc3", nn.Linear(4096, classes)),
    ]


def vgg(depths: tuple[int, ...], size: int, classes: int) -> Layers:
    layers: Layers = []
    channels = 3
    for block, (width, depth) in enumerate(zip((64, 128, 256, 512, 512), depths, strict=True), 1):
        for number in range(1, depth + 1):
            layers.append((f"conv{block}_{number}", nn.Conv2d(channels, width, 3, padding=1)))
            layers.append((f"bn{block}_{number}", nn.BatchNorm2d(width)))
            layers.append((f"relu{block}_{number}", nn.ReLU()))
            channels = width
        layers.append((f"pool{block}", nn.MaxPool2d(2, padding=int(block == 4))))
    return [
        *layers,
        ("flatten", nn.Flatten()),
        ("fc1", nn.Linear(size, 4096)),
        ("relu_fc1", nn.ReLU()),
        ("drop1", nn.Dropout()),
        ("fc2", nn.Linear(4096, 4096)),
        ("relu_fc2", nn.ReLU()),
        ("drop2", nn.Dropout()),
        ("fc3", nn.Linear(4096, classes)),
    ]


PLAIN = {
    "cnn": (lambda: cnn(1600, 10), 32),
    "alexnet": (lambda: alexnet(4096, 10), 32),
    "alexnet-text": (lambda: alexnet(4096, 10, (11, 7, 3, 3, 3)), 32),
    "vgg13": (lambda: vgg((2, 2, 2, 2, 2), 512, 10), 32),
    "vgg16": (lambda: vgg((2, 2, 3, 3, 3), 512, 10), 32),
}


@pytest.mark.parametrize("name", PLAIN)
def test_the_papers_models_as_in_plain_torch(name: str) -> None:
    """Names, first weights (so every draw, in its order) and outputs; checkpoints depend on all of them."""
    make, side = PLAIN[name]
    torch.manual_seed(3)
    plain = nn.Sequential(OrderedDict(make())).eval()
    torch.manual_seed(3)
    table = uncut(name, (3, side, side), 10).eval()
    expected, result = plain.state_dict(), table.state_dict()
    assert list(result) == list(expected)
    assert [key for key, _ in table.named_children()] == [key for key, _ in plain.named_children()]
    assert all(torch.equal(result[key], value) for key, value in expected.items())
    assert [layer.p for layer in table if isinstance(layer, Dropout)] == [
        layer.p for layer in plain if isinstance(layer, nn.Dropout)
    ]
    images = torch.randn(2, 3, side, side)
    torch.testing.assert_close(table(images), plain(images), rtol=1e-4, atol=1e-5)


class BasicBlock(nn.Module):
    """ResNet's block as usually written."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class WideBlock(nn.Module):
    """The wide ResNet's block as usually written: where the width changes, so does what the shortcut takes."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.same = channels == width
        if not self.same:
            self.conv = nn.Conv2d(channels, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.bn1(x))
        out = self.conv2(F.relu(self.bn2(self.conv1(active))))
        return out + (x if self.same else self.conv(active))


def blocks(kind: type[nn.Module], channels: int, widths: tuple[int, ...], depth: int) -> Layers:
    made: Layers = []
    for group, width in enumerate(widths, start=1):
        for number in range(1, depth + 1):
            stride = 2 if group > 1 and number == 1 else 1
            made.append((f"block{group}_{number}", kind(channels, width, stride)))
            channels = width
    return made


def resnet18() -> Layers:
    stem: Layers = [
        ("conv1", nn.Conv2d(3, 64, 3, 1, 1, bias=False)),
        ("bn1", nn.BatchNorm2d(64)),
        ("relu1", nn.ReLU()),
    ]
    head: Layers = [("mean", nn.AdaptiveAvgPool2d(1)), ("flatten", nn.Flatten())]
    return [
        *stem,
        *blocks(BasicBlock, 64, (64, 128, 256, 512), 2),
        *head,
        ("fc", nn.Linear(512, 10)),
    ]


def wrn_28_2() -> Layers:
    last: Layers = [("bn4", nn.BatchNorm2d(128)), ("relu4", nn.ReLU())]
    head: Layers = [("mean", nn.AdaptiveAvgPool2d(1)), ("flatten", nn.Flatten())]
    return [
        ("conv1", nn.Conv2d(3, 16, 3, 1, 1, bias=False)),
        *blocks(WideBlock, 16, (32, 64, 128), 4),
        *last,
        *head,
        ("fc", nn.Linear(128, 10)),
    ]


def in_the_table(key: str) -> str:
    """The name that a weight of the usual form has in the table."""
    key = key.replace(".shortcut.0.", ".shortcut.conv.").replace(".shortcut.1.", ".shortcut.bn.")
    if key.startswith("block") and ".shortcut." not in key:
        block, rest = key.split(".", 1)
        key = f"{block}.shortcut.{rest}" if rest.startswith("conv.") else f"{block}.body.{rest}"
    return key


def wide(key: str) -> str:
    """A group's first BatchNorm stands before its first block, where the shortcut can take it too."""
    first, _, rest = key.partition("_1.bn1.")
    return f"bn{first.removeprefix('block')}.{rest}" if rest else in_the_table(key)


@pytest.mark.parametrize(
    ("name", "make", "renamed", "bottom", "top", "features"),
    [
        ("resnet18", resnet18, in_the_table, 11_168_832, 5_130, 512),
        ("wrn-28-2", wrn_28_2, wide, 1_466_320, 1_290, 128),
    ],
)
def test_residual_models_as_usually_written(
    name: str,
    make: Callable[[], Layers],
    renamed: Callable[[str], str],
    bottom: int,
    top: int,
    features: int,
) -> None:
    """Parameter counts of the literature (11.17 and 1.47 million), and the same function of the weights."""
    split = build(name, (3, 32, 32), 10, projector="none")
    assert (parameter_count(split.bottom), parameter_count(split.top)) == (bottom, top)
    assert split.features == features
    assert [key for key, _ in split.bottom.named_children()][-2:] == ["avgpool", "flatten"]
    plain, table = nn.Sequential(OrderedDict(make())), uncut(name, (3, 32, 32), 10)
    state = {renamed(key): value for key, value in plain.state_dict().items()}
    assert state.keys() == table.state_dict().keys()
    table.load_state_dict(state)
    images = torch.randn(3, 3, 32, 32)
    for mode in (True, False):
        result, expected = table.train(mode)(images), plain.train(mode)(images)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_counts_by_arithmetic_and_on_the_meta_device_agree(name: str) -> None:
    row = MODELS[name]
    with torch.device("meta"):
        cut = catalog.MODELS[name]
        model = build(name, row.shape, row.classes, cut=cut, projector="none")
    placed = place(row.table(), row.shape, row.classes)
    parts = [layer for part in cut_layers(model) for layer in part]
    assert [(key, parameter_count(layer)) for key, layer in parts] == [
        (layer.name, layer.parameters) for layer in placed
    ]
    held = len(named_layers(model.bottom)) - isinstance(model.bottom[-1], nn.Flatten)
    assert model.features == prod(placed[held - 1].gives)
