"""Any module that can be cut: its children in order, or a list of stages."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semisfl.models.own import check_own, stages_of
from tests import toy

SHAPE = (3, 12, 12)


class InOrder(nn.Module):
    """Calls its children in order, with a flatten of its own before the last, as torchvision's models do."""

    def __init__(self, flatten: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.relu = nn.ReLU()
        self.drop = nn.Dropout(0.5)
        self.pool = nn.AdaptiveAvgPool2d(1 if flatten else (10, 4))
        self.fc = nn.Linear(4, 4)
        self.flatten_at_end = flatten

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.drop(self.relu(self.bn(self.conv(x)))))
        return self.fc(x.flatten(1) if self.flatten_at_end else x)


class Branched(nn.Module):
    """Adds its input again: its children in order are another function."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 3, 3, padding=1)
        self.other = nn.Conv2d(3, 3, 3, padding=1)
        self.flat = nn.Flatten()
        self.fc = nn.Linear(3 * 144, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.fc(self.flat(x + self.other(x)))


class HiddenDropout(nn.Module):
    """The same as its children in eval mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.flat, self.fc = nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(400, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.dropout(self.flat(self.conv(x)), 0.5, self.training))


class Backwards(nn.Module):
    """Its children were made in another order than they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.conv, self.flat = nn.Linear(400, 4), nn.Conv2d(3, 4, 3), nn.Flatten()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.flat(self.conv(x)))


@pytest.mark.parametrize("flatten", [True, False])
def test_children_in_order_are_the_model(flatten: bool) -> None:
    model = InOrder(flatten)
    stages = stages_of(model, SHAPE)
    names = [name for name, _ in stages.named_children()]
    expected = ["conv", "bn", "relu", "drop", "pool", "fc"]
    assert names == ([*expected[:-1], "flatten", "fc"] if flatten else expected)
    images = torch.rand(3, *SHAPE)
    assert torch.equal(stages.eval()(images), model.eval()(images))
    assert stages.fc is model.fc, "the layers are the model's own"
    assert torch.equal(model.bn.running_mean, torch.zeros(4)), "looking at it changed nothing"  # type: ignore[arg-type]


def test_a_sequential_stays_and_a_list_becomes_one() -> None:
    model = toy.network()
    assert stages_of(model, SHAPE) is model
    stages = stages_of([model[:2], model[2:]], SHAPE)
    assert [name for name, _ in stages.named_children()] == ["stage1", "stage2"]
    check_own(stages, SHAPE, toy.CLASSES)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Branched(), "Branched that cannot be cut: its children, called in order, give other num"),
        (HiddenDropout(), "called in order, give other numbers than its forward in train mode"),
        (Backwards(), r"called in order, fail \(mat1 and mat2"),
        (nn.Linear(3, 3), "a Linear with 0 modules inside, and two or more are needed"),
        ([nn.Flatten(), "fc"], "a list whose entries are not all modules"),
        ("resnet18", "the model is a str; it must be an nn.Module or a list of stages"),
        ([], "the model is a list; it must be an nn.Module or a list of stages"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_reason(model: nn.Module, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as error:
        stages_of(model, SHAPE)
    assert "\n" not in str(error.value)
