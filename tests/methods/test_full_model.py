"""Test what full-model methods report about their clients."""

import pytest
import torch
from torch import nn

from semisfl.fleet.base import ClientResult
from semisfl.methods.full_model import combine_results, report
from semisfl.runs import experiment as experiments
from tests import toy

STATE = {"w": torch.zeros(1)}


def test_rates_are_means_over_those_who_contributed() -> None:
    results = [
        ClientResult(2, {"model": STATE}, {"loss": 1.0, "loss_consistency": 0.5, "coverage": 0.25}),
        ClientResult(5, {}, {}),
        ClientResult(
            7, {"model": STATE}, {"loss": 4.0, "loss_consistency": 2.0, "coverage": 0.625}
        ),
    ]
    reported = report(results)
    assert reported["contributing"] == 2
    assert reported["loss_semi"] == pytest.approx(2.5)
    assert reported["loss_consistency"] == pytest.approx(1.25)
    assert reported["mask_rate"] == pytest.approx(1 - (0.25 + 0.625) / 2)
    assert reported["coverage_by_client"] == {"2": 0.25, "7": 0.625}
    assert report([ClientResult(5, {}, {})]) == {"contributing": 0}


@pytest.mark.parametrize("method", ["semifl", "fedmatch", "fedswitch"])
@pytest.mark.parametrize(("threshold", "masked"), [("0", 0.0), ("1", 1.0)])
def test_mask_rate_is_the_share_of_images_that_are_not_confident(
    method: str, threshold: str, masked: float
) -> None:
    experiment = toy.assemble(method, f"{method}.confidence_threshold={threshold}")
    row = experiment.method.round(0)
    if method == "semifl" and masked:
        assert row.contributing == 0 and row.mask_rate is None, "nobody has an image to train on"
    else:
        assert row.mask_rate == pytest.approx(masked)
        assert list(row.coverage_by_client.values()) == [pytest.approx(1 - masked)] * 2


@pytest.mark.parametrize(("took_part", "expected"), [(1, 9.0), (2, 9.0), (3, 0.0), (4, 0.0)])
def test_a_single_contributor_decides_only_where_there_are_no_limits(
    took_part: int, expected: float
) -> None:
    """Three clients of whom one contributes are two unchanged models and one update."""
    setup = toy.assemble("semifl", "robust.aggregate=median").method.setup  # type: ignore[attr-defined]
    results = [ClientResult(client, {}, {}) for client in range(took_part - 1)]
    results.append(ClientResult(7, {"model": {"w": torch.full((2,), 9.0)}}, {}))
    assert (
        float(combine_results(setup, results, "model", {"w": torch.zeros(2)})["w"][0]) == expected
    )


def test_supervised_steps_train_batchnorm_and_dropout() -> None:
    """They run in train mode: statistics of the batches are tracked, and dropout is on."""
    experiment = toy.assemble("supervised", batchnorm=True)
    model = experiment.method.tested()["student"]
    before = model.get_buffer("bottom.bn.running_mean").clone()
    experiment.method.round(0)
    assert int(model.get_buffer("bottom.bn.num_batches_tracked")) == 5  # server.steps
    assert not torch.equal(model.get_buffer("bottom.bn.running_mean"), before)
    losses = [
        toy.assemble("supervised", dropout=dropout).method.round(0).loss_supervised
        for dropout in (False, True)
    ]
    assert losses[0] != losses[1]


@pytest.mark.parametrize("method", ["semifl", "fedmatch", "fedswitch", "fl2"])
def test_a_layer_may_be_used_twice_and_have_buffers_of_its_own(method: str) -> None:
    conv, norm, linear = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Linear(16, 16)
    bottom = [nn.Conv2d(3, 6, 3, stride=2), conv, norm, nn.ReLU(), conv, norm, toy.Doubled()]
    top = [nn.Flatten(), nn.Linear(150, 16), linear, nn.ReLU(), linear, nn.Linear(16, 4)]
    data, settings = toy.dataset(), toy.values(method, f"{method}.confidence_threshold=0")
    own = nn.Sequential(*bottom, *top)
    experiment = experiments.assemble(settings, data, toy.partition(data), own, device="cpu")
    before = [parameter.detach().clone() for parameter in own.parameters()]
    for index in range(2):
        assert experiment.method.round(index).contributing == 2
    for slot in experiment.fleet.block._full._slots:
        for model in slot._models.values():
            assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
    (tested, *_) = experiment.method.tested().values()
    for parameter, start in zip(tested.parameters(), before, strict=True):
        assert parameter.isfinite().all() and not torch.equal(parameter, start)
