"""What methods that train whole models report of their clients."""

import pytest
import torch

from semisfl.fleet.base import ClientResult
from semisfl.methods.full_model import report
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


def test_supervised_steps_train_batchnorm_and_dropout() -> None:
    """In train mode: statistics of the batches are tracked, and dropout is on."""
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
