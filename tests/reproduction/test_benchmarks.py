"""Benchmarks still run, at a tiny size; their numbers mean nothing here."""

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reproduction.benchmarks import cluster, network, rounds, timed_rounds, twin
from semisfl.settings import presets
from semisfl.settings.config import override, parse

TINY = ("clients.active=2", "clients.steps=1", "clients.batch=4", "server.steps=1")


def test_an_iteration_over_the_network() -> None:
    result = network.iteration(clients=2, count=1)
    assert min(result["bare_ms"], result["fleet_ms"], result["fleet_ratio"]) > 0


def test_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(twin.CASES, "tiny", ("digits", *TINY))
    phases = twin.measure("tiny", 2)
    assert phases.keys() == {"supervised", "cross_entity"}
    assert all(phase["times_faster"] > 0 for phase in phases.values())


def test_clients_in_one_process() -> None:
    config = parse(override(presets.digits(), ["clients.total=2", *TINY]))
    assert cluster.seconds_alone(cluster.prepare(config), 1, 1) > 0


def test_rounds_of_a_preset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(timed_rounds, "ALL_CONTRIBUTE", TINY)
    options = Namespace(device="cpu", images=1100, rounds=1, kernels=tmp_path)
    turn: Any = SimpleNamespace(send=lambda word: None, recv=lambda: "go")
    result = rounds.timed("digits::supervised", options, turn)
    assert result["item"] == "digits::supervised" and result["shares_percent"]
    assert "kernel seconds" in (tmp_path / "digits-supervised.txt").read_text()
