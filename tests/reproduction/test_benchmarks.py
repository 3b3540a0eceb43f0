"""Benchmarks still run, at a tiny size; their numbers mean nothing here."""

from types import SimpleNamespace
from typing import Any

import pytest

from reproduction.benchmarks import frozen, network, rounds, twin, uploads

TINY = ("clients.active=2", "clients.steps=1", "clients.batch=4", "server.steps=1")


@pytest.mark.slow
def test_an_iteration_over_the_network() -> None:
    result = network.iteration(clients=2, count=1)
    assert min(result["bare_ms"], result["fleet_ms"], result["fleet_ratio"]) > 0


@pytest.mark.slow
def test_devices_that_only_send() -> None:
    result = uploads.uploads(devices=2)
    assert min(result["fleet_mb_per_s"], result["bare_mb_per_s"], result["ratio"]) > 0


def test_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(twin.CASES, "tiny", ("digits", *TINY))
    phases = twin.measure("tiny", 2)
    assert phases.keys() == {"supervised", "cross_entity"}
    assert all(phase["times_faster"] > 0 for phase in phases.values())


def test_rounds_of_a_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "ALL_CONTRIBUTE", TINY)
    turn: Any = SimpleNamespace(send=lambda word: None, recv=lambda: "go")
    result = rounds.timed("digits::supervised", "cpu", 1100, 1, turn)
    assert result["item"] == "digits::supervised" and result["seconds_a_round"] > 0


def test_a_frozen_bottom_against_plain_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen, "SIDE", 32)
    monkeypatch.setitem(frozen.STEPS, "cpu", 1)
    turn: Any = SimpleNamespace(send=lambda word: None, recv=lambda: "go")
    result = frozen.timed("frozen:cnn", "cpu", 220, 1, turn)
    assert result["images_encoded"] > 0
    assert all(result[part]["times_faster"] > 0 for part in ("training", "encoding"))
