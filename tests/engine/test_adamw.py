"""AdamW agrees with PyTorch's; pretrained layers have a rate of their own in both optimisers; moments are saved."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from semisfl.engine.adamw import WARMUP_STEPS, AdamW
from semisfl.engine.sgd import SGD
from semisfl.engine.weights import Weights
from semisfl.runs import checkpoint
from semisfl.settings.run import OptimizerConfig
from tests import toy


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def descend(module: nn.Module, step: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    step(module(torch.randn(4, 6, generator=generator)).square().mean())


@pytest.mark.parametrize("lr_pretrained", [None, 0.002])
def test_steps_are_those_of_torch(lr_pretrained: float | None) -> None:
    config = OptimizerConfig(lr=0.02, lr_pretrained=lr_pretrained, weight_decay=0.02)
    ours = network()
    theirs = copy.deepcopy(ours)
    for parameter in ours[0].parameters():
        parameter.pretrained = True
    optimizer = AdamW(ours.parameters(), config)
    groups = [
        {"params": list(theirs[0].parameters())},
        {"params": list(theirs[2].parameters())},
    ]
    reference = torch.optim.AdamW(groups, weight_decay=0.02)
    for number in range(WARMUP_STEPS + 10):
        if number % 8 == 0:  # a round's restart keeps the moments
            optimizer.restart(0.02)
        rise = min(1.0, (number + 1) / WARMUP_STEPS)
        for group, share in zip(
            reference.param_groups, ((lr_pretrained or 0.02) / 0.02, 1), strict=True
        ):
            group["lr"] = 0.02 * rise * share
        descend(ours, optimizer.descend, number)

        def step(loss: torch.Tensor) -> None:
            reference.zero_grad()
            loss.backward()
            reference.step()

        descend(theirs, step, number)
    toy.assert_same(dict(theirs.state_dict()), dict(ours.state_dict()))


def test_working_copies_follow_their_masters() -> None:
    copies = [parameter.detach().bfloat16() for parameter in network().parameters()]
    for copy_ in copies:
        copy_.master = copy_.float()  # type: ignore[attr-defined]
    before = [one.clone() for one in copies]
    optimizer = AdamW(copies, OptimizerConfig(lr=5.0))
    optimizer.restart(5.0)
    optimizer.apply([torch.ones_like(one) for one in copies])
    for one, was in zip(copies, before, strict=True):
        assert torch.equal(one, one.master.bfloat16()) and not torch.equal(one, was)  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sgd_steps_pretrained_layers_by_their_own_rate(dtype: torch.dtype) -> None:
    """A step of the whole model is that of two optimisers, one per rate."""
    config = OptimizerConfig(lr=0.1, lr_pretrained=0.01, weight_decay=0.01)
    ours = network()
    Weights(ours, dtype, copied=list(ours.parameters()))
    for parameter in ours[0].parameters():
        parameter.pretrained = True
    plain = network()
    sgd = SGD(ours.parameters(), config)
    sgd.restart(0.1)
    parts = [
        torch.optim.SGD(part.parameters(), lr, 0.9, nesterov=True, weight_decay=0.01)
        for part, lr in ((plain[0], 0.01), (plain[2], 0.1))
    ]
    for number in range(4):
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        sgd.descend(ours(inputs.to(dtype)).float().square().mean())
        for part in parts:
            part.zero_grad()
        plain(inputs).square().mean().backward()
        for part in parts:
            part.step()
    for name, value in plain.state_dict().items():
        tolerance = 1e-6 if dtype == torch.float32 else 2e-2
        ours_now = ours.get_parameter(name)
        master = getattr(ours_now, "master", ours_now)
        torch.testing.assert_close(master, value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("method", ["semisfl", "supervised", "fedswitch-sl", "semifl", "fedmatch"])
def test_moments_are_saved_and_restored(method: str, tmp_path: Path) -> None:
    settings = ("optimizer.kind=adamw", "optimizer.lr=0.003", "optimizer.lr_min=0", "rounds=3")
    straight = toy.assemble(method, *settings)
    for number in range(3):
        straight.method.round(number)
    before = toy.assemble(method, *settings)
    for number in range(2):
        before.method.round(number)
    checkpoint.write(tmp_path / "latest.safetensors", before.state_dict())
    after = toy.assemble(method, *settings)
    after.load_state_dict(checkpoint.read(tmp_path / "latest.safetensors"))
    after.method.round(2)
    assert checkpoint.digest(after.method.state_dict()) == checkpoint.digest(
        straight.method.state_dict()
    )
