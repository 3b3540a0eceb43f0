"""What only a GPU can show: recorded steps, fused kernels, working copies. Run with ``-m gpu``."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from semisfl import checkpoint, config, presets, run
from semisfl.config import Config
from semisfl.hardware import Hardware
from tests.twin import PlainTwin, bn_model, toy_data

pytestmark = pytest.mark.gpu


def settings(*changes: str) -> Config:
    small = [
        "rounds=5",
        "data.labeled=12",
        "data.partition.kind=iid",
        "clients.total=4",
        "clients.active=3",
        "clients.batch=8",
        "clients.steps=10",
        "server.batch=8",
        "server.steps=10",
        "semisfl.confidence_threshold=0.5",
        "runtime.precision=fp32",
    ]
    return config.parse(config.override(presets.values_of("digits"), [*small, *changes]))


@pytest.mark.parametrize("model", [None, bn_model])
def test_recorded_steps_equal_the_plain_twin(model: Any) -> None:
    # Every label is kept: a confidence that falls on either side of a threshold would be a jump.
    options = settings(
        "data.augment.flip=true", "semisfl.confidence_threshold=0", "optimizer.lr=0.01"
    )
    data = toy_data(side=16 if model else 28)
    twin_experiment = run.assemble(options, data, model=model() if model else None, device="cpu")
    partition = run.divide(options, data)
    if model is not None:
        # Dropout masks differ between a CPU's and a GPU's generator.
        for layer in twin_experiment.method.student.modules():  # type: ignore[attr-defined]
            if hasattr(layer, "p"):
                layer.p = 0.0
    twin = PlainTwin(options, twin_experiment.method.student, data, partition)  # type: ignore[attr-defined]
    fast = run.assemble(options, data, model=model() if model else None, device="cuda")
    for layer in fast.method.student.modules():  # type: ignore[attr-defined]
        if hasattr(layer, "p"):
            layer.p = 0.0
    for index in range(5):
        expected, row = twin.round(index), fast.method.round(index)
        assert row["loss_supervised"] == pytest.approx(expected["loss_supervised"], rel=1e-4)
        assert row["loss_semi"] == pytest.approx(expected["loss_semi"], rel=1e-4)
    assert fast.method.cross_entity_step._graph is not None  # type: ignore[attr-defined]
    mine = fast.method.student.state_dict()  # type: ignore[attr-defined]
    for name, tensor in twin.student.state_dict().items():
        torch.testing.assert_close(mine[name].cpu(), tensor, rtol=1e-4, atol=1e-5)


def test_two_replays_show_different_images() -> None:
    fast = run.assemble(settings("rounds=2"), toy_data(side=28), device="cuda")
    fast.method.round(0)
    batches = fast.fleet.batches  # type: ignore[attr-defined]
    seen = [batches._views["strong"][step].float().mean().item() for step in range(10)]
    assert len(set(seen)) == 10
    fast.method.round(1)
    again = [batches._views["strong"][step].float().mean().item() for step in range(10)]
    assert not set(seen) & set(again)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_deterministic_resume_is_bit_identical(precision: str, tmp_path: Path) -> None:
    options = settings(
        "runtime.deterministic=true", f"runtime.precision={precision}", "runtime.checkpoint_every=3"
    )
    data = toy_data(side=28)
    run.train(options, data=data, device="cuda", out=tmp_path / "whole")
    half = run.assemble(options, data, device="cuda")
    directory = run.RunDirectory.create(tmp_path / "half", options)

    def stop(row: dict[str, Any]) -> None:
        half.hardware.stopping = row["round"] == 2

    assert run.run_rounds(half, directory, observe=stop).stopped
    run.resume(tmp_path / "half", data=data, device="cuda")
    states = [checkpoint.read(tmp_path / name / "latest.safetensors") for name in ("whole", "half")]
    assert checkpoint.digest(states[0]) == checkpoint.digest(states[1])


@pytest.mark.parametrize("pool", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8, 64, 32, 32), (3, 70, 7, 9), (5, 192, 6, 4)])
def test_fused_pooling_equals_pytorch(
    shape: tuple[int, ...], dtype: torch.dtype, pool: int
) -> None:
    from semisfl import kernels

    x = torch.randn(shape, device="cuda", dtype=dtype).contiguous(memory_format=torch.channels_last)
    bias = torch.randn(shape[1], device="cuda")
    ours, theirs = (
        (x.clone().requires_grad_(), bias.clone().requires_grad_()),
        (
            x.clone().requires_grad_(),
            bias.clone().requires_grad_(),
        ),
    )
    mine = kernels.bias_relu(*ours, pool)
    plain = F.relu(F.max_pool2d(theirs[0].float(), pool) + theirs[1].view(-1, 1, 1)).to(dtype)
    torch.testing.assert_close(mine, plain)
    slope = torch.randn_like(mine)
    for got, wanted in zip(
        torch.autograd.grad(mine, ours, slope),
        torch.autograd.grad(plain, theirs, slope),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)


def test_working_copies_follow_their_masters() -> None:
    hardware = Hardware("cuda")
    assert hardware.weights_dtype is torch.bfloat16
    options = settings("runtime.precision=bf16")
    fast = run.assemble(options, toy_data(side=28), device="cuda")
    for index in range(3):
        fast.method.round(index)
    student = fast.method.student  # type: ignore[attr-defined]
    for name, parameter in student.named_parameters():
        master = student.state_dict()[name]
        assert master.dtype is torch.float32
        torch.testing.assert_close(parameter.float(), master, rtol=1e-2, atol=1e-3)
        assert torch.equal(parameter, master.to(torch.bfloat16))


@pytest.mark.parametrize(
    "method", ["supervised", "semifl", "fedmatch", "fedswitch", "fedswitch-sl"]
)
def test_every_method_runs_recorded(method: str, caplog: pytest.LogCaptureFixture) -> None:
    options = settings(f"method={method}", "runtime.precision=bf16", "optimizer.lr=0.05")
    result = run.train(options, data=toy_data(side=28), device="cuda")
    assert result.accuracy > 0
    assert "cannot be recorded" not in caplog.text
