"""Checkpoints come from good rounds only, and the one before the latest is kept beside it."""

import logging
import math
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from semisfl.fleet.base import RoundAborted
from semisfl.metrics import MethodMetrics
from semisfl.runs import checkpoint, start
from semisfl.runs.experiment import Experiment, assemble
from semisfl.runs.loop import not_finite, run_rounds
from semisfl.runs.reading import read_rounds
from tests.net.harness import tiny, toy_data


def experiment(**changes: object) -> Experiment:
    data, partition = toy_data(2)
    return assemble(tiny(2, method="supervised", **changes), data, partition, device="cpu")


def scale_weights(model: torch.nn.Module, factor: float) -> None:
    with torch.no_grad():
        for parameter in model.bottom.parameters():
            parameter.mul_(factor)


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_a_fault(factor: float) -> None:
    method = experiment().method
    assert not_finite(method, MethodMetrics(loss_supervised=2.0)) is None
    scale_weights(method.tested()["student"], factor)
    assert "student bottom" in (not_finite(method, MethodMetrics(loss_supervised=2.0)) or "")


def test_losses_that_are_not_finite_are_a_fault() -> None:
    method = experiment().method
    assert not_finite(method, MethodMetrics(loss_semi=math.nan)) == "loss_semi is nan"
    assert not_finite(method, MethodMetrics(loss_semi=math.inf)) == "loss_semi is inf"


def test_a_bad_round_is_repeated_once_without_the_device_that_stands_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If it is bad without that device too, the run ends; the bytes of both attempts are counted."""
    for bad, rounds in ((1, 2), (2, 1)):
        data, partition = toy_data(2)
        built = assemble(tiny(2, rounds=2), data, partition, device="cpu")
        original, calls, ended = built.method.round, count(), list[bool]()

        def damaged(index: int) -> MethodMetrics:
            metrics = original(index)  # noqa: B023
            return replace(metrics, loss_semi=math.nan) if next(calls) < bad else metrics  # noqa: B023

        def settle(good: bool) -> str | None:
            ended.append(good)  # noqa: B023
            return None if good else "camera-1"

        built.method.round = damaged  # type: ignore[method-assign]
        built.fleet.settle = settle  # type: ignore[method-assign]
        result = run_rounds(built)
        assert len(result.rounds) == rounds and result.diverged == (bad == 2)
        assert ended == ([False, True, True] if bad == 1 else [False, False])
        assert "round 1 is repeated without camera-1: loss_semi is nan" in caplog.text
        assert result.rounds[0]["bytes_repeated"] == result.rounds[0]["bytes_total"] > 0
    assert "round 1 diverged, also without camera-1" in caplog.text


def test_a_resumed_run_remembers_the_bytes_of_undone_attempts(tmp_path: Path) -> None:
    data, partition = toy_data(2)
    images: dict[str, Any] = {"data": data, "partition": partition, "device": "cpu"}
    with start.begin(
        tiny(2, rounds=2, stop={"gigabytes": 1e-9}), out=tmp_path / "run", **images
    ) as run:
        method, failed = run.experiment.method, iter([True])
        original = method.round

        def too_few_once(index: int) -> MethodMetrics:
            metrics = original(index)
            if next(failed, False):
                raise RoundAborted("one client answered")
            return metrics

        method.round = too_few_once  # type: ignore[method-assign]
        first = run.go().rounds[-1]
    assert first["bytes_repeated"] == first["bytes_total"] > 0
    last = start.resume(tmp_path / "run", settings=["stop.gigabytes=none"], **images).rounds[-1]
    assert last["round"] == 1 and last["bytes_repeated"] == first["bytes_repeated"]


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
    assert [row["round"] for row in read_rounds(path, dict)] == [0, 1, 2, 3], "it ended there"
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
