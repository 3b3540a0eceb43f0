"""Values that are impossible cost their device the round; the possible ones of one device harm nobody."""

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from reproduction.poisoning.attacks import ATTACKS, PoisonedBlock, attackers_of, poisoned_fleet
from semisfl.fleet.base import AbnormalValues
from semisfl.net.client import member
from semisfl.net.server.sessions import STRIKES
from semisfl.net.server.value_checks import MOST, MOST_COUNTED, impossible, stands_out, update_size
from semisfl.runs.directory import RunDirectory
from semisfl.runs.experiment import assemble
from semisfl.runs.loop import run_rounds
from semisfl.settings.robust import SERVED
from tests.net.harness import (
    BATCHNORM,
    Leaving,
    Network,
    assert_same,
    audited,
    network,
    oracle,
    poisoning,
    tiny,
    toy_data,
    until,
    weights,
)


def filled(value: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: torch.full_like(tensor, value)


def one(value: float) -> Callable[[Tensor], Tensor]:
    """Return a change of the first value of a tensor."""
    return lambda tensor: tensor.flatten().index_fill(0, torch.tensor(0), value).view(tensor.shape)


def times(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor * factor


def assert_sound(net: Network) -> None:
    for key, value in weights(net.experiment).items():
        assert torch.isfinite(value.float()).all() and value.float().abs().max() < 1e3, key


# --- what is possible -----------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.01 * MOST, -1.01 * MOST])
def test_one_impossible_number_makes_a_tensor_unusable(value: float) -> None:
    good = torch.randn(3, 4)
    assert impossible({"student": good, "empty": torch.zeros(0)}) is None
    bad = good.clone()
    bad[1, 2] = value
    assert "teacher has values from" in (impossible({"student": good, "teacher": bad}) or "")


def test_counters_and_variances_have_ranges_of_their_own() -> None:
    assert impossible({"bottom/1.num_batches_tracked": torch.tensor(MOST_COUNTED)}) is None
    assert impossible({"bottom/1.running_mean": torch.tensor([-5.0])}) is None
    for name, wrong in (
        ("num_batches_tracked", torch.tensor(-1)),
        ("num_batches_tracked", torch.tensor(MOST_COUNTED + 1)),
        ("running_var", torch.tensor([1.0, -1e-9])),
    ):
        assert name in (impossible({f"bottom/1.{name}": wrong}) or "")


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, None),
        ({"features": {0: 9.0}}, None),
        ({"features": {0: 1.0, 1: 2.9}}, None),
        ({"features": {0: 1.0, 1: 3.1}}, 1),
        ({"features": {0: 1.0, 1: 1.0, 2: 5.0}}, 2),
        ({"features": {0: 1.0, 1: 8.0, 2: 1.0}, "update": {0: 0.1, 1: 0.1, 2: 0.9}}, 2),
        ({"features": {0: 1.0, 1: 9.0, 2: 1.0}, "update": {0: 0.1, 1: 0.1, 2: 0.8}}, 1),
        ({"update": {0: 0.0, 1: 0.1, 2: 0.0}}, 1),
    ],
)
def test_who_stands_out(sizes: dict[str, dict[int, float]], expected: int | None) -> None:
    assert stands_out(sizes) == expected


def test_an_update_is_how_far_the_weights_moved() -> None:
    sent = {"weight": torch.zeros(2), "running_mean": torch.zeros(1), "count": torch.tensor(3)}
    state = {
        "weight": torch.tensor([3.0, 4.0]),
        "running_mean": torch.ones(1),
        "count": torch.tensor(9),
    }
    assert update_size(state, sent) == 5.0


# --- impossible values over the network -----------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "value"), [("features", math.nan), ("features", -1e30), ("bottom", math.inf)]
)
def test_impossible_values_are_dropped_before_they_are_used(
    kind: str, value: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    poisoning(monkeypatch, kind, one(value), last=0)
    config = tiny(3)
    with network(config) as net:
        net.join_all()
        rounds = run_rounds(net.experiment).rounds
        step = 0 if kind == "features" else config.clients.steps
        assert_same(net.experiment, oracle(config, Leaving(1, 0, step, back=1)))
        assert net.strikes == {"plaintext:client-1": 1}
    assert len(audited(caplog)) == 1
    assert [list(one.get("held_back") or {}) for one in rounds] == [["1"], []]


@pytest.mark.parametrize("method", ["semisfl", "fedswitch", "semifl"])
def test_a_device_that_goes_on_is_shut_out_and_the_others_finish(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoning(monkeypatch, "features" if method == "semisfl" else "states", one(math.nan))
    settings = {"semifl": {"confidence_threshold": 0.0}}
    with network(tiny(3, rounds=STRIKES + 1, method=method, **settings)) as net:
        net.join_all()
        run_rounds(net.experiment)
        until(lambda: net.fleet.present() == [0, 2])
        assert net.strikes == {"plaintext:client-1": STRIKES}
        assert_sound(net)


def test_a_counter_that_is_impossible_shuts_out_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    poisoning(monkeypatch, "bottom", filled(MOST_COUNTED + 1), counters=True)
    with network(tiny(3, rounds=2, model={"layers": BATCHNORM})) as net:
        net.join_all()
        run_rounds(net.experiment)
        assert net.strikes == {"plaintext:client-1": 2}


def test_values_that_most_devices_send_are_the_servers_own_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Honest devices whose weights the server's learning rate ruined are not struck."""
    with network(tiny(3)) as net:
        net.join_all()
        poisoning(monkeypatch, "features", one(math.nan), of=(0, 1))
        with pytest.raises(AbnormalValues, match="most devices answer with impossible values"):
            net.experiment.method.round(0)
        assert net.strikes == {} and net.fleet.present() == [0, 1, 2]


def test_the_server_sends_no_impossible_values(monkeypatch: pytest.MonkeyPatch) -> None:
    with network(tiny(3)) as net:
        net.join_all()
        original = net.fleet.backward
        monkeypatch.setattr(net.fleet, "backward", lambda rows: original(rows * 1e30))
        result = run_rounds(net.experiment)
        assert result.diverged and net.strikes == {} and net.fleet.present() == [0, 1, 2]


# --- rounds that diverge --------------------------------------------------------------------------


def ruined_by(net: Network, monkeypatch: pytest.MonkeyPatch, culprit: int | None) -> None:
    """Let the weights become NaN in rounds with this client; None: in every round."""
    method: Any = net.experiment.method
    original = method.round

    def ruin(index: int) -> Any:
        metrics = original(index)
        if culprit is None or culprit in method.active:
            with torch.no_grad():
                next(method.student.bottom.parameters()).fill_(torch.nan)
        return metrics

    monkeypatch.setattr(method, "round", ruin)


@pytest.mark.parametrize("clients", [2, 3])
@pytest.mark.parametrize("kind", ["features", "bottom"])
def test_a_round_that_diverged_is_repeated_once_without_who_stood_out(
    kind: str, clients: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As if it had not been there; it is passed over for some rounds, and the bytes of both attempts count."""
    poisoning(monkeypatch, kind, times(50.0))
    config = tiny(clients, rounds=2)
    with network(config) as net:
        net.join_all()
        ruined_by(net, monkeypatch, 1)
        rounds = run_rounds(net.experiment).rounds
        assert_same(net.experiment, oracle(config, Leaving(1, -1, 0)))
        assert net.strikes == {} and 1 not in net.fleet.present()
        sent = net.fleet.traffic.by_client()[0]
    assert "round 1 is repeated without plaintext:client-1: " in caplog.text
    first = next(group for group in rounds[0]["bytes_by_client"] if 0 in group["clients"])
    usual = next(group for group in rounds[1]["bytes_by_client"] if 0 in group["clients"])
    assert first["features_up"] == 2 * usual["features_up"]
    assert rounds[1]["bytes_repeated"] > 0 and sum(sent) > 0


def test_a_round_that_diverges_again_ends_the_run_and_names_the_device(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    poisoning(monkeypatch, "bottom", times(50.0), first=1)
    config = tiny(3, rounds=3)
    with network(config) as net:
        net.join_all()
        rounds = iter([False, True, True])
        method: Any = net.experiment.method
        original = method.round

        def ruin(index: int) -> Any:
            metrics = original(index)
            if next(rounds):
                with torch.no_grad():
                    next(method.student.bottom.parameters()).fill_(torch.nan)
            return metrics

        monkeypatch.setattr(method, "round", ruin)
        directory = RunDirectory.create(tmp_path / "run", config)
        result = run_rounds(net.experiment, directory)
    assert result.diverged and directory.load()["round"] == 1
    assert "round 2 diverged, also without plaintext:client-1" in caplog.text


def test_with_a_quorum_of_all_nobody_can_be_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    poisoning(monkeypatch, "bottom", times(50.0))
    with network(tiny(2, rounds=1, network={"quorum": 2})) as net:
        net.join_all()
        ruined_by(net, monkeypatch, None)
        assert run_rounds(net.experiment).diverged
    assert "plaintext:client-1 stands out; the round cannot be repeated without it" in caplog.text


# --- possible values of an attacker ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "attack"),
    [
        ("semisfl", "reversed_update"),
        ("semisfl", "replayed_features"),
        ("fedswitch-sl", "noise_features"),
        ("fedswitch", "reversed_update"),
    ],
)
def test_an_attack_and_its_rule_are_the_same_over_the_network(
    method: str, attack: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "semisfl")
    config = tiny(4, method=method, robust=SERVED, clients={"steps": 3})
    (attacker,) = attackers_of(config.seed, 4, 0.25)
    make = poisoned_fleet(ATTACKS[attack], 0.25)
    simulated = assemble(config, *toy_data(4), device="cpu", make_fleet=make)
    rows = run_rounds(simulated).rounds
    block = partial(PoisonedBlock, attack=ATTACKS[attack], attackers={attacker})
    monkeypatch.setattr(member, "ClientBlock", block)
    with network(config) as net:
        net.join_all()
        over_network = run_rounds(net.experiment).rounds
        reached = weights(net.experiment)
    for key, value in weights(simulated).items():
        torch.testing.assert_close(value, reached[key], rtol=1e-3, atol=1e-4, msg=key)
    held_back = [list(row.get("held_back") or {}) for row in over_network]
    assert held_back == [list(row.get("held_back") or {}) for row in rows]
    if attack == "reversed_update":
        assert held_back == [[str(attacker)]] * 2
        name, reason = f"plaintext:client-{attacker}", over_network[0]["held_back"][str(attacker)]
        assert f"{name} is held back: {reason}" in caplog.text
        assert caplog.text.count(f"{name} is held back: ") == 2, "one line per round"


@pytest.mark.parametrize("clients", [2, 3])
def test_a_round_of_two_has_no_limit_and_a_round_of_three_has(
    clients: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two honest devices whose updates differ are not held back; of three, one that differs much is."""
    poisoning(monkeypatch, "bottom", times(1.5))
    config = tiny(clients, rounds=1, robust=SERVED)
    with network(config) as net:
        net.join_all()
        (row,) = run_rounds(net.experiment).rounds
    assert list(row.get("held_back") or {}) == ([] if clients == 2 else ["1"])
    assert ("is held back" in caplog.text) is (clients == 3)


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
