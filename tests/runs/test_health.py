"""Checkpoints come from good rounds only, and the one before the latest is kept beside it."""

import logging
import math
from pathlib import Path

import pytest
import torch

from semisfl.metrics import MethodMetrics
from semisfl.runs import checkpoint, start
from semisfl.runs.experiment import Experiment, assemble
from semisfl.runs.health import Health
from tests.net.harness import tiny, toy_data


def experiment(**changes: object) -> Experiment:
    data, partition = toy_data(2)
    return assemble(tiny(2, method="supervised", **changes), data, partition, device="cpu")


def scale_weights(model: torch.nn.Module, factor: float) -> None:
    with torch.no_grad():
        for parameter in model.bottom.parameters():
            parameter.mul_(factor)


@pytest.mark.parametrize("factor", [11.0, math.nan, math.inf])
def test_weights_that_jump_are_a_fault(factor: float) -> None:
    method = experiment().method
    health = Health(method)
    assert health.fault(MethodMetrics(loss_supervised=2.0)) is None
    scale_weights(method.tested()["student"], factor)
    assert "student bottom" in (health.fault(MethodMetrics(loss_supervised=2.0)) or "")


def test_losses_that_jump_are_a_fault() -> None:
    health = Health(experiment().method)
    assert "nan" in (health.fault(MethodMetrics(loss_semi=math.nan)) or "")
    assert health.fault(MethodMetrics(loss_semi=500.0)) is None, "with nothing to compare it with"
    assert health.fault(MethodMetrics(loss_semi=0.5)) is None
    assert health.fault(MethodMetrics(loss_semi=99.0)) is None
    assert "loss_semi is 1001" in (health.fault(MethodMetrics(loss_semi=1001.0)) or "")
    assert health.fault(MethodMetrics(loss_semi=math.inf)) == "loss_semi is inf"
    assert health.fault(MethodMetrics(loss_semi=math.nan)) == "loss_semi is nan"


def run_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: int, rounds: int) -> Path:
    """Train a run whose own process damages its weights in round ``bad``."""
    data, partition = toy_data(2)
    config = tiny(2, method="supervised", rounds=rounds)
    with start.begin(
        config, out=tmp_path / "run", data=data, partition=partition, device="cpu"
    ) as run:
        method = run.experiment.method
        original = method.round

        def damaged_round(index: int) -> MethodMetrics:
            row = original(index)
            if index == bad:
                scale_weights(method.tested()["student"], math.nan)
            return row

        monkeypatch.setattr(method, "round", damaged_round)
        run.go()
    return tmp_path / "run"


def test_a_bad_round_writes_no_checkpoint_and_a_resumed_run_says_where_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = run_damaged(tmp_path, monkeypatch, bad=3, rounds=5)
    assert checkpoint.read(path / "latest.safetensors")["round"] == 3
    assert checkpoint.read(path / "previous.safetensors")["round"] == 2
    data, partition = toy_data(2)
    with caplog.at_level(logging.WARNING):
        result = start.resume(path, data=data, partition=partition, device="cpu")
    assert f"going on from {path / 'latest.safetensors'}: 3 rounds done" in caplog.text
    assert [row["round"] for row in result.rounds] == [0, 1, 2, 3, 4]
    assert math.isfinite(result.rounds[-1]["loss_supervised"])
    assert checkpoint.read(path / "latest.safetensors")["round"] == 5


@pytest.mark.parametrize("how", ["poisoned", "damaged"])
def test_where_the_latest_cannot_be_used_the_one_before_it_is(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = run_damaged(tmp_path, monkeypatch, bad=99, rounds=3)
    latest = path / "latest.safetensors"
    if how == "poisoned":
        state = checkpoint.read(latest)
        next(iter(state["method"]["student"].values())).fill_(math.nan)
        checkpoint.write(latest, state)
    else:
        latest.write_bytes(latest.read_bytes()[:-7])
    data, partition = toy_data(2)
    result = start.resume(path, data=data, partition=partition, device="cpu")
    assert f"going on from {path / 'previous.safetensors'}: 2 rounds done" in caplog.text
    assert [row["round"] for row in result.rounds] == [0, 1, 2]
    (path / "previous.safetensors").write_bytes(b"")
    latest.write_bytes(b"")
    with pytest.raises(checkpoint.CheckpointError, match="damaged"):
        start.resume(path, data=data, partition=partition, device="cpu")
