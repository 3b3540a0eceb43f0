"""The optimiser against torch's own."""

import pytest
import torch
from torch import nn

from semisfl import seeds
from semisfl.engine.hardware import Hardware
from semisfl.engine.sgd import SGD
from semisfl.settings.run import OptimizerConfig


def twins() -> tuple[nn.Module, nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        one = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 4)).to(
            memory_format=torch.channels_last
        )
    other = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 4))
    other.load_state_dict(one.state_dict())
    return one, other


def batch(number: int) -> torch.Tensor:
    return torch.from_numpy(seeds.generator(number, "sgd").normal(size=(5, 2, 4, 4))).float()


@pytest.mark.parametrize(("momentum", "kept"), [(0.9, False), (0.0, False), (0.9, True)])
def test_equals_a_new_torch_optimiser_each_phase(momentum: float, kept: bool) -> None:
    """Or the same one in all phases, if the momentum is kept."""
    mine, theirs = twins()
    config = OptimizerConfig(momentum=momentum, weight_decay=0.01, keep_momentum=kept)
    sgd = Hardware("cpu").optimizer(mine.parameters(), config)
    other = None
    for phase, lr in enumerate((0.1, 0.03)):
        sgd.restart(lr)
        if other is None or not kept:
            other = torch.optim.SGD(
                theirs.parameters(),
                lr=lr,
                momentum=momentum,
                nesterov=momentum > 0,
                weight_decay=0.01,
            )
        other.param_groups[0]["lr"] = lr
        for step in range(4):
            images = batch(10 * phase + step)
            sgd.descend(mine(images).square().mean())
            other.zero_grad()
            theirs(images).square().mean().backward()
            other.step()
    for one, two in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-5)


def test_returns_the_gradients_asked_for_and_leaves_none_behind() -> None:
    mine, _ = twins()
    sgd = SGD(mine.parameters(), OptimizerConfig())
    sgd.restart(0.1)
    images, unused = batch(0).requires_grad_(), batch(1).requires_grad_()
    expected = torch.autograd.grad(mine(images).square().mean(), images)[0]
    before = [parameter.detach().clone() for parameter in mine.parameters()]
    received, nothing = sgd.descend(mine(images).square().mean(), also=[images, unused])
    torch.testing.assert_close(received, expected)
    assert not nothing.any()
    assert all(parameter.grad is None for parameter in mine.parameters())
    assert not any(
        torch.equal(old, new) for old, new in zip(before, mine.parameters(), strict=True)
    )


def test_parameters_a_loss_does_not_reach_stay_as_they_are() -> None:
    """As with torch's optimiser: no gradient, no weight decay."""
    mine, _ = twins()
    idle = nn.Parameter(torch.ones(3))
    sgd = SGD([*mine.parameters(), idle], OptimizerConfig(weight_decay=0.1))
    sgd.restart(0.1)
    sgd.descend(mine(batch(0)).sum())
    assert torch.equal(idle, torch.ones(3))


def test_clips_the_joint_norm() -> None:
    weight = nn.Parameter(torch.zeros(2))
    sgd = SGD([weight], OptimizerConfig(momentum=0.0, weight_decay=0.0))
    sgd.restart(1.0)
    sgd.apply([torch.tensor([3.0, 4.0])], clip_norm=1.0)
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]), atol=1e-5, rtol=0)


def test_the_norm_is_that_of_all_parameters_and_short_gradients_stay_short() -> None:
    weights = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    sgd = SGD(weights, OptimizerConfig(momentum=0.0, weight_decay=0.0))
    sgd.restart(1.0)
    sgd.apply([torch.tensor([3.0]), torch.tensor([4.0])], clip_norm=1.0)
    assert [float(w.detach()) for w in weights] == pytest.approx([-0.6, -0.8], abs=1e-5)
    sgd.apply([torch.tensor([0.3]), torch.tensor([-0.4])], clip_norm=1.0)
    assert [float(w.detach()) for w in weights] == pytest.approx([-0.9, -0.4], abs=1e-5)
