"""A frozen bottom never changes, whoever trains or averages the model around it."""

import copy
import math

import pytest
import torch
from torch import nn

from semisfl.algorithm.teacher import Teacher
from semisfl.engine.hardware import Hardware
from semisfl.models.build import build, build_model
from semisfl.models.freezing import freeze
from semisfl.models.split import SplitModel
from tests.net.harness import BATCHNORM, tiny

FROZEN = {"bottom": "frozen"}


def batchnorm_model(**clients: str) -> SplitModel:
    config = tiny(model={"layers": BATCHNORM}, clients=clients)
    return build_model(config, (1, 16, 16), 4)


@pytest.mark.parametrize(("name", "cut"), [("cnn", None), ("efficientnet-lite0", "block3")])
def test_it_computes_what_the_bottom_computes_in_eval_mode(name: str, cut: str | None) -> None:
    shape = (3, 32, 32)
    bottom = build(name, shape, 4, cut=cut, projector="none").bottom.eval()
    images = torch.randn(3, *shape)
    with torch.no_grad():
        expected = bottom(images)
    before = copy.deepcopy(bottom.state_dict())
    frozen = freeze(bottom)
    assert torch.equal(frozen(images), expected)
    after = frozen.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_only_top_and_head_have_parameters() -> None:
    model, plain = batchnorm_model(**FROZEN), batchnorm_model()
    assert list(model.bottom.parameters()) == []
    names = {name for name, _ in model.named_parameters()}
    assert names == {name for name, _ in plain.named_parameters() if name[:6] != "bottom"}
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_train_mode_and_gradients_do_not_reach_it() -> None:
    model = batchnorm_model(**FROZEN)
    before = copy.deepcopy(model.bottom.state_dict())
    model.train()
    images = torch.randn(6, 1, 16, 16, requires_grad=True)
    features = model.bottom(images)
    assert not features.requires_grad
    assert model.top.training
    assert not any(layer.training for layer in model.bottom.modules())
    assert torch.equal(model.bottom(images[:2]), features[:2])
    after = model.bottom.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_it_takes_and_gives_the_dtype_of_the_images() -> None:
    model = batchnorm_model(**FROZEN)
    images = torch.randn(2, 1, 16, 16).bfloat16()
    expected = model.bottom(images.float()).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model.bottom(images), expected)


def test_steps_and_moving_averages_leave_its_weights_exactly() -> None:
    hardware, config = Hardware("cpu"), tiny(clients=FROZEN)
    student = hardware.working_copy(batchnorm_model(**FROZEN))
    before = copy.deepcopy(student.state_dict())
    sgd = hardware.sgd(student.parameters(), config.optimizer)
    teacher = Teacher(student, 0.9)
    teacher.pair_with(sgd)
    sgd.restart(1e-3)
    for _ in range(20):
        logits = student(torch.randn(8, 1, 16, 16))
        sgd.descend(
            logits.square().mean() + student.projector(torch.ones(8, student.features)).mean()
        )
        teacher.update()
    for model in (student, teacher.model):
        after = model.state_dict()
        changed = {name.partition(".")[0] for name in after if not after[name].equal(before[name])}
        assert changed == {"top", "projector"}
    assert all(math.isfinite(float(tensor.sum())) for tensor in after.values())


def test_a_batchnorm_without_stored_statistics_is_refused() -> None:
    layers = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, track_running_stats=False))
    with pytest.raises(ValueError, match="track_running_stats"):
        freeze(layers)
