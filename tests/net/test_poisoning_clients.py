"""Attackers over the network: held back as in a simulation, and named in log, audit lines and metrics."""

import json
import logging
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from reproduction.poisoning.attacks import ATTACKS, Attack
from reproduction.poisoning.fleet import PoisonedBlock, attackers_of, poisoned_fleet
from semisfl.net.client import member
from semisfl.runs.experiment import assemble
from semisfl.runs.loop import run_rounds
from tests.cli.test_deploy import TINY, labeled, serve_words, served
from tests.net.harness import accept_all, network, tiny, toy_data, weights
from tests.processes import Forked

__all__ = ["labeled"]  # a fixture
LIMITED = {"aggregate": "clipped_mean", "features": "limited"}


@pytest.mark.parametrize(
    ("method", "attack"),
    [
        ("semisfl", "reversed_update"),
        ("semisfl", "replayed_features"),
        ("semisfl", "stale_bottom"),
        ("fedswitch-sl", "noise_features"),
        ("fedswitch", "reversed_update"),
    ],
)
def test_an_attack_and_its_rule_are_the_same_over_the_network(
    method: str, attack: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "semisfl")
    config = tiny(4, method=method, robust=LIMITED, clients={"steps": 3})
    (attacker,) = attackers_of(config.seed, 4, 0.25)
    make = poisoned_fleet(ATTACKS[attack], 0.25)
    data, partition = toy_data(4)
    simulated = assemble(config, data, partition, device="cpu", make_fleet=make)
    rows = run_rounds(simulated).rounds
    monkeypatch.setattr(
        member,
        "ClientBlock",
        partial(PoisonedBlock, attack=ATTACKS[attack], attackers={attacker}),
    )
    with network(config) as net:
        net.join_all()
        over_network = run_rounds(net.experiment).rounds
        reached = weights(net.experiment)
    for key, value in weights(simulated).items():
        torch.testing.assert_close(value, reached[key], rtol=1e-3, atol=1e-4, msg=key)
    assert [row.get("held_back", {}).keys() for row in over_network] == [
        row.get("held_back", {}).keys() for row in rows
    ]
    if attack == "reversed_update":
        assert [list(row["held_back"]) for row in over_network] == [[str(attacker)]] * 2
        reason = over_network[0]["held_back"][str(attacker)]
        name = f"plaintext:client-{attacker}"
        assert f"{name} is held back: {reason}" in caplog.text
        (peer,) = {r.args[0] for r in caplog.records if r.name == "semisfl.audit" and r.args}
        assert f"held back peer={peer} identity={name} reason={reason}" in caplog.text


def test_round_metrics_name_a_client_with_unbelievable_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = tiny(4, rounds=1)
    (attacker,) = attackers_of(config.seed, 4, 0.25)
    times_100 = Attack("times_100", "", features=lambda s: (100 * s.student, 100 * s.teacher))
    scaled = partial(PoisonedBlock, attack=times_100, attackers={attacker})
    monkeypatch.setattr(member, "ClientBlock", scaled)
    with network(config) as net:
        net.join_all()
        (row,) = run_rounds(net.experiment).rounds
    assert (
        list(row["held_back"]) == [str(attacker)] and "is usual" in row["held_back"][str(attacker)]
    )


@pytest.mark.slow
def test_a_process_that_attacks_is_held_back(labeled: Path) -> None:
    """Server, two honest devices and an attacker, each a process of its own."""
    settings = [*TINY, "clients.total=3", "clients.active=3", "robust.aggregate=clipped_mean"]
    settings += ["semisfl.confidence_threshold=0.2", "network.deadline=300"]
    with served(*serve_words(labeled), "--out", "out", *settings) as (server, port):
        devices = []
        for name in ("one", "two", "attacker"):
            program = ["-m", "semisfl"]
            if name == "attacker":
                program = ["-m", "tests.net.poisoning_client", "reversed_update"]
            words = ["join", f"127.0.0.1:{port}", "--data", str(labeled / "train")]
            words += ["--insecure-loopback", "--name", name, *accept_all(port)]
            devices.append(Forked([sys.executable, *program, *words]))
        _, err = server.communicate(timeout=300)
        codes = [device.wait(60) for device in devices]
    assert (server.returncode, codes) == (0, [0, 0, 0]), err
    place = json.loads(Path("out/roster.json").read_text())["index"]["plaintext:attacker"]
    rows = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert [list(row["held_back"]) for row in rows] == [[str(place)]] * 2
    log = Path("out/run.log").read_text()
    assert "held back peer=" in log and "identity=plaintext:attacker reason=its update is" in log
