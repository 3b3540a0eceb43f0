"""Sharpness-aware steps, and momentum of what is averaged."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from semisfl.algorithm import sharpness
from semisfl.algorithm.momentum import ServerMomentum


def test_a_sharpness_aware_gradient_is_that_at_the_moved_weights() -> None:
    torch.manual_seed(0)
    top = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    features = torch.randn(6, 4, dtype=torch.double, requires_grad=True)
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    loss = sharpness.cross_entropy(top, features, labels, 0.3)
    got = torch.autograd.grad(loss, [features, *top.parameters()])

    before = [weight.detach().clone() for weight in top.parameters()]
    slopes = torch.autograd.grad(F.cross_entropy(top(features).float(), labels), top.parameters())
    length = torch.cat([slope.flatten() for slope in slopes]).norm()
    assert float(length) > 0.1
    with torch.no_grad():
        for weight, slope in zip(top.parameters(), slopes, strict=True):
            weight.add_(0.3 * slope / length)
    moved = F.cross_entropy(top(features).float(), labels)
    expected = torch.autograd.grad(moved, [features, *top.parameters()])
    assert float(loss.detach()) == pytest.approx(float(moved.detach()), rel=1e-6)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-8)
    # Only this test moved the weights.
    assert not any(torch.equal(a, b) for a, b in zip(before, top.parameters(), strict=True))


def test_without_a_radius_it_is_cross_entropy() -> None:
    torch.manual_seed(0)
    top, features, labels = nn.Linear(4, 3), torch.randn(2, 4), torch.tensor([0, 2])
    plain = F.cross_entropy(top(features).float(), labels)
    assert torch.equal(sharpness.cross_entropy(top, features, labels, 0.0), plain)


def test_momentum_of_the_mean() -> None:
    """v <- m v + (mean - w), w <- w + v; a running statistic is the mean's."""
    layer = nn.BatchNorm1d(1)
    momentum = ServerMomentum(layer, 0.5)
    # v: 1; 0.5 + (3 - 1) = 2.5; 1.25 + (3 - 3.5) = 0.75.
    for mean, expected in ((1.0, 1.0), (3.0, 3.5), (3.0, 4.25)):
        state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        state["bias"].fill_(mean)
        state["running_mean"].fill_(mean)
        layer.load_state_dict(momentum.after(state))
        assert float(layer.running_mean) == mean  # type: ignore[arg-type]
        assert float(layer.bias.detach()) == pytest.approx(expected)
    assert float(layer.weight.detach()) == 1
