"""Any module that can be cut: its children in order, or a list of stages."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

from semisfl.models.build import build_model
from semisfl.models.own import check_own, stages_of
from semisfl.models.split import split
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
        (nn.Linear(12, 3), "a Linear that cannot be cut"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_reason(model: nn.Module, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as error:
        stages_of(model, SHAPE)
    assert "\n" not in str(error.value)


def with_hook(kind: str) -> nn.Sequential:
    """Return a model whose convolution has the hook that old functions of PyTorch put there."""
    model = toy.network()
    if kind == "prune":
        prune.l1_unstructured(model.conv, "weight", 0.5)
    elif kind == "forward":
        model.conv.register_forward_hook(lambda *_: None)
    else:
        getattr(nn.utils, kind)(model.conv)
    return model


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "prune", "forward"])
def test_hooks_that_training_would_not_call_are_refused(kind: str) -> None:
    model = with_hook(kind)
    reason = r"layer 'conv' \(Conv2d\) has a forward hook.*use torch.nn.utils.parametrizations"
    with pytest.raises(ValueError, match=reason):
        stages_of(model, SHAPE)
    with pytest.raises(ValueError, match=r"layer 'stage1.conv' \(Conv2d\)"):
        stages_of([model[:2], model[2:]], SHAPE)


def test_weights_made_on_the_first_image_follow_from_the_runs_seed() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(toy.CLASSES))
    settings = toy.values("supervised")
    state = torch.random.get_rng_state()
    one, other = (
        build_model(settings, SHAPE, toy.CLASSES, copy.deepcopy(model)).top.state_dict()
        for _ in range(2)
    )
    toy.assert_same(one, other)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("layer", [nn.Dropout2d(), nn.AlphaDropout(), nn.RReLU()])
def test_layers_whose_draws_cannot_be_repeated_are_refused(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), layer, nn.Flatten(), nn.Linear(400, toy.CLASSES))
    reason = rf"layer '1' \({type(layer).__name__}\) draws from torch's global .* repeated"
    with pytest.raises(ValueError, match=reason):
        check_own(model, SHAPE, toy.CLASSES)
    for fine in (nn.Dropout(0.5), nn.Dropout2d(0.0)):
        model[1] = fine
        check_own(model, SHAPE, toy.CLASSES)


class OwnDropout(nn.Module):
    """Drops values with torch's global generator, or with the dropout layer inside."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3) if inside else None

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x) if self.drop else nn.functional.dropout(x, 0.3, self.training)


def test_a_layer_whose_code_draws_by_itself_is_refused() -> None:
    """Two runs of one seed would differ, and nothing would say why."""
    stages = [nn.Conv2d(3, 4, 3), OwnDropout(False), nn.Flatten(), nn.Linear(400, toy.CLASSES)]
    state = torch.random.get_rng_state()
    reason = r"'1' \(OwnDropout\) draws from torch's global .* let an nn.Dropout inside it draw"
    with pytest.raises(ValueError, match=reason):
        build_model(toy.values("supervised"), SHAPE, toy.CLASSES, nn.Sequential(*stages))
    stages[1] = OwnDropout(True)
    build_model(toy.values("supervised"), SHAPE, toy.CLASSES, nn.Sequential(*stages))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_model_that_makes_probabilities_is_refused() -> None:
    """With two softmaxes no image would ever be confident, and nothing would say why."""
    layers = [nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(400, toy.CLASSES)]
    check_own(nn.Sequential(*layers, nn.LogSoftmax(1)), SHAPE, toy.CLASSES)
    with pytest.raises(ValueError, match=r"makes probabilities.*; leave out its last softmax"):
        check_own(nn.Sequential(*layers, nn.Softmax(1)), SHAPE, toy.CLASSES)


def test_a_parameter_is_on_one_side_of_the_cut() -> None:
    shared = nn.Linear(8, 8)
    layers = [nn.Flatten(), nn.Linear(432, 8), shared, nn.ReLU(), shared, nn.Linear(8, 4)]
    with pytest.raises(ValueError, match=r"parameter '2\.weight' is on both sides of the cut"):
        split(nn.Sequential(*layers), SHAPE, cut=3)
    assert split(nn.Sequential(*layers), SHAPE, cut=2).features == 8
