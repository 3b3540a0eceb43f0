"""Modules as tables of layers: they agree with the modules, and an operation that no layer describes is named."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semisfl import load, parse, resume, table_of, train
from semisfl.models.build import build
from semisfl.runs.pretrained import Pretrained
from semisfl.use.model_card import card
from tests.models.test_backbones import shaken


class BasicBlock(nn.Module):
    def __init__(self, takes: int, gives: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(takes, gives, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(gives)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(gives, gives, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(gives)
        self.downsample = (
            nn.Sequential(nn.Conv2d(takes, gives, 1, stride, bias=False), nn.BatchNorm2d(gives))
            if stride != 1
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 16, 2))
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer1(self.pool(F.relu(self.bn1(self.conv1(x)))))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class Squeeze(nn.Module):
    """Squeeze-and-excitation with linear layers, as SENet has it, or with convolutions, as MobileNetV3."""

    def __init__(self, width: int, linear: bool) -> None:
        super().__init__()
        self.linear = linear
        self.fc1 = nn.Linear(width, 4) if linear else nn.Conv2d(width, 4, 1)
        self.fc2 = nn.Linear(4, width) if linear else nn.Conv2d(4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        if not self.linear:
            return F.hardsigmoid(self.fc2(F.relu(self.fc1(F.adaptive_avg_pool2d(x, 1))))) * x
        n, width = x.shape[:2]
        factors = torch.sigmoid(self.fc2(F.relu(self.fc1(x.mean((2, 3))))))
        return x * factors.view(n, width, 1, 1).expand_as(x)


class Inverted(nn.Module):
    def __init__(self, linear: bool) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(8, 24, 1), nn.BatchNorm2d(24), nn.Hardswish(True))
        self.deep = nn.Conv2d(24, 24, 5, padding="same", groups=24)
        self.squeeze = Squeeze(24, linear)
        self.project = nn.Sequential(nn.Conv2d(24, 8, 1, bias=False), nn.BatchNorm2d(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.project(self.squeeze(F.hardswish(self.deep(self.expand(x)))))


class NextBlock(nn.Module):
    def __init__(self, last: bool) -> None:
        super().__init__()
        self.last = last
        self.deep = nn.Conv2d(8, 8, 7, padding=3, groups=8)
        self.norm = nn.LayerNorm(8, eps=1e-6)
        self.wide, self.narrow = nn.Linear(8, 32), nn.Linear(32, 8)
        self.gamma = nn.Parameter(torch.full((8,), 0.5) if last else torch.full((1, 8, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.deep(x).permute(0, 2, 3, 1))
        y = self.narrow(F.gelu(self.wide(y)))
        y = (
            (self.gamma * y).permute(0, 3, 1, 2)
            if self.last
            else y.permute(0, 3, 1, 2) * self.gamma
        )
        return x + y


def plain() -> nn.Module:
    return nn.Sequential(
        nn.ZeroPad2d((0, 1, 0, 1)),
        nn.Conv2d(3, 8, 3, 2),
        nn.ReLU6(),
        nn.GroupNorm(2, 8),
        nn.AvgPool2d(2),
        nn.Conv2d(8, 8, (3, 1), padding=(1, 0)),
        nn.SiLU(),
        nn.Dropout2d(0.1),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 16),
        nn.BatchNorm1d(16),
        nn.Dropout(0.5),
        nn.Linear(16, 10),
    )


def around(block: nn.Module) -> nn.Module:
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    return nn.Sequential(nn.Conv2d(3, 8, 4, 4), block, *head)


NETWORKS = {
    "plain": (plain, ["conv", "relu6", "groupnorm", "avgpool", "conv", "silu"]),
    "resnet": (ResNet, ["conv", "batchnorm", "relu", "pool", "residual", "relu"]),
    "mobile": (lambda: around(Inverted(False)), ["conv", "residual", "avgpool"]),
    "senet": (lambda: around(Inverted(True)), ["conv", "residual", "avgpool"]),
    "next": (lambda: around(NextBlock(True)), ["conv", "residual", "avgpool"]),
    "next of timm": (lambda: around(NextBlock(False)), ["conv", "residual", "avgpool"]),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_becomes_a_table(name: str, tmp_path: Path) -> None:
    make, kinds = NETWORKS[name]
    module = shaken(make())
    images = torch.randn(2, 3, 32, 32)
    backbone = table_of(module, images)
    assert [layer.kind for layer in backbone.layers][: len(kinds)] == kinds
    assert backbone.layers[-1].model_dump() == {"kind": "linear", "name": backbone.layers[-1].name}
    # A file of it starts a model of the table, whatever its cut.
    backbone.save(tmp_path / "b.safetensors", source="a test", licence="MIT")
    config = parse({"model": {"weights": str(tmp_path / "b.safetensors"), "cut": backbone.cuts[0]}})
    assert config.model.layers == backbone.layers and config.data.size == 32
    model = build(config.model.table, (3, 32, 32), 10, cut=config.model.cut).eval()
    assert not Pretrained.read(str(config.model.weights), config.model.name).copy_into(
        model, "custom"
    )
    with torch.no_grad():
        expected, got = module(images), model(images)
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("ResNet", {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 1]}),
        ("ConvNext", {"num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 2]}),
        ("MobileNetV2", {"depth_multiplier": 0.35, "tf_padding": True}),
    ],
)
def test_networks_of_another_package(kind: str, settings: dict[str, object]) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(num_labels=7, **settings)
    module = shaken(getattr(transformers, f"{kind}ForImageClassification")(config))
    assert table_of(module, torch.randn(1, 3, 64, 64)).layers  # the outputs were compared


def test_features_without_a_head_get_a_linear_layer() -> None:
    backbone = table_of(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.randn(2, 3, 8, 8))
    assert [layer.kind for layer in backbone.layers][2:] == ["avgpool", "flatten", "linear"]
    assert backbone.cuts == ("0_0", "1_1", "2")


class Odd(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.inner, self.what = nn.Conv2d(3, 8, 3), what

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return {
            "cat": lambda: torch.cat([y, y], 1),
            "mul": lambda: self.inner(x + 0 * x) * F.relu(y),
            "mean": lambda: y.mean(1),
            "tanh": lambda: F.gelu(y, approximate="tanh"),
            "add": lambda: y + 1,
            "mish": lambda: nn.Sequential(nn.Mish())(y),
        }[self.what]()


@pytest.mark.parametrize("what", ["cat", "mul", "mean", "tanh", "add", "mish"])
def test_an_operation_without_a_layer_is_named(what: str) -> None:
    with pytest.raises(ValueError, match=f"(?s)(?=.*{what})(?=.*body)") as refused:
        table_of(BodyOf(what), torch.randn(2, 3, 8, 8))
    assert "\n" not in str(refused.value)


class BodyOf(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.body = Odd(what)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def test_a_run_from_a_file_alone(tmp_path: Path) -> None:
    file = tmp_path / "backbone.safetensors"
    digits = nn.Sequential(
        nn.Conv2d(1, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)
    )
    backbone = table_of(shaken(digits), torch.randn(2, 1, 14, 14))
    with pytest.raises(ValueError, match="mean has 3 values"):
        backbone.save(file, mean=[0.5] * 3)
    backbone.save(file, mean=[0.5], std=[0.25], source="example.org", licence="CC-BY-4.0")
    small = {"rounds": 1, "clients": {"total": 2, "active": 2, "steps": 1, "batch": 8}}
    values = {"server": {"steps": 1}, "model": {"weights": str(file), "cut": "2_2"}, **small}
    train(parse(values), device="cpu", out=tmp_path / "run")
    file.unlink()
    model = load(tmp_path / "run")
    assert model.description.mean == (0.5,) and model.description.shape == (1, 14, 14)
    assert "example.org, licence: CC-BY-4.0" in card(model)
    assert len(model.predict(torch.zeros(2, 1, 14, 14, dtype=torch.uint8)).labels) == 2
    assert resume(tmp_path / "run", device="cpu").rounds
