"""Benchmarks still run, at a tiny size; their numbers mean nothing here."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reproduction.benchmarks import cluster, rounds, timed_rounds, twin
from semisfl.settings import presets
from semisfl.settings.config import override, parse
from tests import processes

FLOWER = """
import sys
from unittest.mock import MagicMock
for name in ("app", "clientapp", "serverapp", "serverapp.strategy", "simulation"):
    sys.modules[f"flwr.{name}"] = MagicMock()  # Flower is not installed here
from reproduction.benchmarks import flower
case = "one convolution, batch 10"
ours = flower.Ours(case, 1)
first = {name: value.clone() for name, value in ours.model.state_dict().items()}
ours.round(1)
assert flower.largest_difference(ours.model.state_dict(), first) > 0
assert flower.gflop_a_step(case) > 0
flower.holdings(case, 1)
"""
TINY = ("clients.active=2", "clients.steps=1", "clients.batch=4", "server.steps=1")


def network(*names: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "reproduction.benchmarks.network", *names, "--small"]
    done = processes.run(command, timeout=200)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_an_iteration_over_the_network() -> None:
    (result,) = network("iteration")
    assert result["benchmark"] == "network_iteration"
    assert min(result[f"{name}_ms"] for name in ("bare", "transport", "fleet")) > 0


@pytest.mark.slow
def test_idle_clients_after_an_iteration() -> None:
    """As `make bench` runs them. A heartbeat comes every ten seconds."""
    iteration, idle = network()
    assert iteration["benchmark"] == "network_iteration"
    assert idle["clients"] == 3 and idle["seconds_until_all_are_back"] >= 0


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


def test_our_half_of_the_comparison_with_flower() -> None:
    done = processes.run([sys.executable, "-c", FLOWER], timeout=200)
    assert done.returncode == 0, done.stderr
