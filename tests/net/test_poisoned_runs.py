"""One device with plausible values neither stops a run nor poisons it, and no honest one is shut out."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from reproduction.poisoning import attacks as poisoning
from reproduction.poisoning.fleet import PoisonedBlock, attackers_of
from semisfl.cli.main import main
from semisfl.metrics import MethodMetrics
from semisfl.net.client import member
from semisfl.runs import start
from semisfl.runs.checkpoint import finite
from semisfl.runs.directory import RunDirectory
from semisfl.runs.loop import run_rounds
from semisfl.runs.reading import read_rounds
from semisfl.runs.result import Result
from semisfl.settings.config import Config
from semisfl.settings.robust import SERVED
from tests.net.harness import Network, certificates, network, tiny, toy_data, until
from tests.net.poisoned_grid import ATTACKERS, ATTACKS, attacked_run, digits
from tests.net.test_poisoning import assert_sound


def attacked(
    monkeypatch: pytest.MonkeyPatch, config: Config, attack: str, share: float
) -> set[int]:
    """Let a share of the devices attack; return which."""
    attackers = attackers_of(config.seed, config.clients.total, share)
    block = partial(PoisonedBlock, attack=poisoning.ATTACKS[attack], attackers=attackers)
    monkeypatch.setattr(member, "ClientBlock", block)
    return set(attackers)


def saved_run(net: Network, place: Path) -> tuple[Result, RunDirectory]:
    directory = RunDirectory.create(place, net.config)
    return run_rounds(net.experiment, directory), directory


@pytest.mark.parametrize("clients", [5, 3])
def test_nine_times_its_bottom_does_not_stop_a_run(
    clients: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over mutual TLS, with a quorum of all: nobody can be left out."""
    config = tiny(clients, rounds=4, robust=SERVED, network={"quorum": clients})
    (attacker,) = attacked(monkeypatch, config, "scaled_bottom", 1 / clients)
    with network(config, certificates=certificates(tmp_path / "certs", clients)) as net:
        net.join_all()
        result, directory = saved_run(net, tmp_path / "run")
        assert_sound(net)
        assert net.strikes == {} and len(net.fleet.present()) == clients
    assert [list(row["held_back"]) for row in result.rounds] == [[str(attacker)]] * 4
    assert directory.load()["round"] == 4


@pytest.mark.parametrize("clients", [5, 3, 2])
def test_with_the_plain_mean_who_sends_nine_times_its_bottom_is_shut_out(
    clients: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(clients, rounds=5)
    (attacker,) = attacked(monkeypatch, config, "scaled_bottom", 1 / clients)
    with network(config) as net:
        net.join_all()
        saved_run(net, tmp_path / "run")
        assert_sound(net)
        assert net.strikes == {f"plaintext:client-{attacker}": 3}
        assert net.fleet.present() == [c for c in range(clients) if c != attacker]


def ruined(net: Network, rounds: Callable[[int], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server's own weights become NaN at the end of some rounds, counted as they are run."""
    method, count = net.experiment.method, iter(range(100))
    original = method.round

    def ruin(index: int) -> MethodMetrics:
        metrics = original(index)
        if rounds(next(count)):
            with torch.no_grad():
                next(method.student.bottom.parameters()).fill_(torch.nan)  # type: ignore[attr-defined]
        return metrics

    monkeypatch.setattr(method, "round", ruin)


def test_what_the_server_itself_ruined_ends_the_run_and_is_nobodys_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with network(tiny(3, rounds=4)) as net:
        net.join_all()
        ruined(net, lambda run: run == 1, monkeypatch)
        result, directory = saved_run(net, tmp_path / "run")
        assert net.strikes == {} and net.fleet.present() == [0, 1, 2]
    assert result.diverged and "round 2 diverged" in caplog.text
    assert [line["round"] for line in read_rounds(directory.path, dict)] == [0, 1]
    state = directory.load()
    assert state["round"] == 1 and finite(state["method"])


def test_a_trial_ends_when_too_few_others_are_here() -> None:
    with network(tiny(3, network={"quorum": 2, "deadline": 0.1})) as net:
        net.join_all()
        size_checks = net.fleet._questions.size_checks
        for client, size in enumerate((1.0, 5.0, 1.0)):
            size_checks.note_answer(client, {"student": size})
        size_checks.outliers()
        assert net.fleet.settle(good=False) == "plaintext:client-1"
        net.clients[2].kill()
        until(lambda: net.fleet.present() == [0])
        net.fleet.wait_ready()
        assert net.fleet.present() == [0, 1]


# --- what `serve` does by default -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "aggregate", "features"),
    [
        ([], "clipped_mean", "limited"),
        (["robust.aggregate=mean"], "mean", "limited"),
        (["robust.features=as_sent", "robust.clipped_mean.limit=2"], "clipped_mean", "as_sent"),
        (["clients.active=2"], "mean", "as_sent"),
    ],
)
def test_serve_limits_each_device_unless_it_is_told_otherwise(
    changes: list[str],
    aggregate: str,
    features: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served: list[Config] = []

    def begin(config: Config, **_: object) -> None:
        served.append(config)
        raise ValueError("enough")

    monkeypatch.setattr(start, "begin", begin)
    monkeypatch.setattr("semisfl.runs.run_data.load_images", lambda *_, **__: toy_data(3)[0])
    words = ["serve", "--labeled", str(tmp_path), "--out", str(tmp_path / "run")]
    words += ["--listen", "127.0.0.1:0", "--insecure-loopback"]
    assert main([*words, *(word for one in changes for word in ("--set", one))]) == 2
    (config,) = served
    assert (config.robust.aggregate, config.robust.features) == (aggregate, features)
    if "robust.clipped_mean.limit=2" in changes:
        assert config.robust.of_rule.limit == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("active", "quorum", "robust", "level", "line"),
    [
        (2, 2, {}, logging.WARNING, "clients.active = 2: a single device can ruin the run"),
        (3, 3, {}, logging.WARNING, "robust.features = as_sent: a single device can ruin the run"),
        (3, 3, SERVED, logging.INFO, "each device's influence is limited: robust.aggregate = clip"),
        (3, 1, SERVED, logging.INFO, "set network.quorum=3 to wait for more"),
    ],
)
def test_a_server_says_at_start_what_one_device_can_do(
    active: int,
    quorum: int,
    robust: dict[str, str],
    level: int,
    line: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "semisfl")
    with network(tiny(active, robust=robust, network={"quorum": quorum})):
        pass
    assert [record.levelno for record in caplog.records if line in record.getMessage()] == [level]


# --- the grid of docs/poisoning.md over the network -----------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("clients", list(ATTACKERS))
def test_an_attack_costs_little_and_stops_nothing(
    clients: int, attack: str, tmp_path: Path
) -> None:
    folder, config = certificates(tmp_path, clients), digits(clients, attackers=ATTACKERS[clients])
    honest, run = attacked_run(config, None, folder), attacked_run(config, attack, folder)
    # On one seed; docs/poisoning.md has the mean, which is below one point.
    assert honest["accuracy"] - run["accuracy"] <= 3.0
    assert run["rounds"] == config.rounds
    assert not run["honest_struck"] and not run["honest_gone"]
