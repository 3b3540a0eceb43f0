"""One client's values, believable one by one, must neither ruin a run nor shut honest clients out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from semisfl.engine.kernels.plain import SHORTEST
from semisfl.methods.semifl.method import SemiFLWork
from semisfl.net.client.device import Device
from semisfl.net.frames import encode
from semisfl.net.server import value_checks
from semisfl.net.server.penalties import EXCUSES, STRIKES
from semisfl.net.server.value_checks import ABSURD, MOST_COUNTED, impossible, miscounted, ranges
from semisfl.runs.directory import RunDirectory
from semisfl.runs.loop import run_rounds
from tests.net.harness import (
    BATCHNORM,
    Leaving,
    Network,
    assert_same,
    network,
    oracle,
    poisoning,
    tiny,
    until,
    weights,
)

JUST_BELOW = 0.9 * ABSURD


def filled(value: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: torch.full_like(tensor, value)


def times(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor * factor


def assert_sound(net: Network) -> None:
    for key, value in weights(net.experiment).items():
        assert torch.isfinite(value.float()).all() and value.float().abs().max() < 1e3, key


@pytest.mark.parametrize("kind", ["features", "bottom"])
def test_values_just_below_the_limit_are_left_out_and_honest_clients_are_not_struck(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoning(monkeypatch, kind, filled(JUST_BELOW))
    config = tiny(3)
    with network(config) as net:
        net.join_all()
        run_rounds(net.experiment)
        step = 0 if kind == "features" else config.clients.steps
        assert_same(net.experiment, oracle(config, *(Leaving(1, r, step, r + 1) for r in (0, 1))))
        assert net.strikes == {"plaintext:client-1": 2}


def test_an_attacker_is_shut_out_and_the_others_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    poisoning(monkeypatch, "features", filled(JUST_BELOW))
    config = tiny(3, rounds=5)
    with network(config) as net:
        net.join_all()
        run_rounds(net.experiment)
        until(lambda: net.fleet.present() == [0, 2])
        assert net.strikes == {"plaintext:client-1": 3}
        assert_sound(net)


@pytest.mark.parametrize("length", [1e-10, 1.01e-6, 1.01 * SHORTEST])
def test_tiny_features_do_not_end_a_run_without_a_projector(
    length: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys are then features at unit length: the gradients of tiny ones would have no bound."""
    poisoning(
        monkeypatch, "features", lambda rows: rows * (length / rows.norm(dim=1, keepdim=True))
    )
    config = tiny(4, rounds=4, model={"projector": "none"}, semisfl={"temperature": 0.01})
    with network(config) as net:
        net.join_all()
        assert len(run_rounds(net.experiment).rounds) == 4
        assert set(net.strikes) <= {"plaintext:client-1"}
        assert_sound(net)


@pytest.mark.parametrize("kind", ["features", "bottom"])
@pytest.mark.parametrize("first", [0, 1])
def test_with_two_clients_a_round_that_blows_up_is_repeated_without_who_stands_out(
    kind: str, first: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody is outvoted here: in the first round only the harm done shows that something is wrong."""
    poisoning(monkeypatch, kind, filled(JUST_BELOW), first)
    config = tiny(2)
    with network(config) as net:
        net.join_all()
        run_rounds(net.experiment)
        assert_sound(net)
        assert net.strikes == {"plaintext:client-1": 2 - first}
    if first == 0 and kind == "features":
        assert "round 1 is repeated" in caplog.text and "client-1" in caplog.text


def test_a_round_is_repeated_as_if_who_stood_out_had_not_been_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(value_checks, "FIRST_UPDATE", 100.0)  # only the harm done is noticed
    poisoning(monkeypatch, "bottom", times(35))
    config = tiny(2, rounds=1)
    with network(config) as net:
        net.join_all()
        run_rounds(net.experiment)
        assert_same(net.experiment, oracle(config, Leaving(1, -1, 0)))
        assert {client for _, _, client in net.fleet.traffic.counts} == {0}
        assert net.strikes == {"plaintext:client-1": 1}
    repeated = "round 1 is repeated without plaintext:client-1: the norm of the student bottom's"
    assert repeated in caplog.text


def test_a_client_on_trial_is_not_drawn_until_a_round_was_good() -> None:
    with network(tiny(3)) as net:
        net.join_all()
        fleet, size_checks = net.fleet, net.fleet._questions.size_checks
        for client, size in enumerate((1.0, 5.0, 1.0)):
            size_checks.note_answer(client, {"student": size})
        assert size_checks.outliers() == {}
        assert fleet.settle(good=False) == "plaintext:client-1"
        assert fleet.present() == [0, 2] and not fleet.wait_for(3, seconds=0)
        assert fleet.settle(good=True) is None
        assert fleet.present() == [0, 1, 2] and net.strikes == {"plaintext:client-1": 1}


@pytest.mark.parametrize("factor", [60.0, 1e5])
@pytest.mark.parametrize("method", ["fedswitch", "fedmatch", "semifl"])
def test_whole_models_are_held_against_each_other_too(
    method: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoning(monkeypatch, "states", times(factor))
    config = tiny(3, method=method, semifl={"confidence_threshold": 0.0})
    with network(config) as net:
        net.join_all()
        run_rounds(net.experiment)
        assert_sound(net)
        assert net.strikes == {"plaintext:client-1": 2}


def test_values_caused_by_the_server_are_no_strike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server's own gradients are absurd once; nobody stands out, nobody is punished."""
    config = tiny(3, clients={"steps": 3})
    with network(config) as net:
        net.join_all()
        original, left = net.fleet.backward, [1]

        def backward(gradients: Tensor) -> None:
            left[0] -= 1
            original(gradients * 1e30 if left[0] >= 0 else gradients)

        monkeypatch.setattr(net.fleet, "backward", backward)
        run_rounds(net.experiment)
        assert net.strikes == {} and net.fleet.present() == [0, 1, 2]


def test_a_poisoned_round_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a quorum of all nobody can be left out: the run goes on, and keeps what was good."""
    monkeypatch.setattr(value_checks, "FIRST_UPDATE", 100.0)
    poisoning(monkeypatch, "bottom", times(35))
    config = tiny(2, rounds=1, network={"quorum": 2})
    with network(config) as net:
        net.join_all()
        directory = RunDirectory.create(tmp_path / "run", config)
        run_rounds(net.experiment, directory)
    assert not (directory.path / "latest.safetensors").exists()
    assert "it keeps its last good checkpoint" in caplog.text
    assert "plaintext:client-1 stands out" in caplog.text


def test_counters_have_no_limit_that_training_can_reach() -> None:
    seen = {"bottom/1.num_batches_tracked": torch.tensor(5_000_000)}
    assert impossible(seen, ranges(seen)) is None
    for wrong in (-1, MOST_COUNTED + 1, 2**63 - 1):
        seen = {"bottom/1.num_batches_tracked": torch.tensor(wrong)}
        assert "num_batches_tracked" in (impossible(seen, ranges(seen)) or "")


def test_a_counter_that_no_training_reaches_shuts_out_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mean of 2**53 and honest counters would bring honest clients above what is believed."""
    poisoning(monkeypatch, "bottom", filled(MOST_COUNTED), counters=True)
    with network(tiny(3, rounds=3, model={"layers": BATCHNORM})) as net:
        net.join_all()
        run_rounds(net.experiment)
        assert net.strikes == {"plaintext:client-1": 3}
        counters = [
            value for value in weights(net.experiment).values() if value.dtype == torch.int64
        ]
        assert counters and max(int(value.max()) for value in counters) < 1000


@pytest.mark.parametrize("method", ["semifl", "fl2"])
def test_a_counter_of_statistics_shuts_out_nobody_else(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counters of static BatchNorm add up, and are part of a state that nobody was sent under its name."""
    poisoning(monkeypatch, "states", filled(MOST_COUNTED), counters=True)
    with network(tiny(3, rounds=3, method=method, model={"layers": BATCHNORM})) as net:
        net.join_all()
        run_rounds(net.experiment)
        assert net.strikes == {"plaintext:client-1": 3}
        assert net.fleet.present() == [0, 2]


def test_good_rounds_give_excuses_back() -> None:
    """Over a long run two devices could else use up the excuses of an honest one, and have it shut out."""
    with network(tiny(3, rounds=EXCUSES + 1)) as net:
        penalties = net.fleet._listener.penalties
        net.join_all()
        assert [penalties.excuse("plaintext:client-0") for _ in range(EXCUSES + 2)][-2:] == [
            False,
            False,
        ]
        run_rounds(net.experiment)
        assert penalties.excuse("plaintext:client-0")
        assert not net.strikes


@pytest.mark.parametrize("rule", ["clipped_mean", "median", "krum"])
def test_a_device_has_no_model_for_itself_where_the_others_decline(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In SemiFL honest devices without a confident label add nothing; a rule needs three that do."""
    declines = {}
    start = SemiFLWork.start
    for alone in (False, True):
        with monkeypatch.context() as patch:

            def started(work: Any, client: Any, alone: bool = alone) -> bool:
                return start(work, client) and alone and client.client == 1

            patch.setattr(SemiFLWork, "start", started)
            poisoning(patch, "states", times(-1.0))
            settings = {"semifl": {"confidence_threshold": 0.0}, "robust": {"aggregate": rule}}
            with network(tiny(5, method="semifl", network={"quorum": 3}, **settings)) as net:
                net.join_all()
                rounds = run_rounds(net.experiment).rounds
                declines[alone] = weights(net.experiment)
    assert [list(one["held_back"]) for one in rounds] == [["1"], ["1"]]
    for name, tensor in declines[False].items():
        assert torch.equal(tensor, declines[True][name]), name


def test_a_counter_may_move_by_any_number_of_steps_that_a_run_may_have() -> None:
    sent = {"1.num_batches_tracked": torch.tensor(MOST_COUNTED - 5_000_000)}
    state = {"1.num_batches_tracked": torch.tensor(MOST_COUNTED)}
    assert miscounted(state, sent) is None
    sent = {"1.num_batches_tracked": torch.tensor(0)}
    assert "1.num_batches_tracked moved by" in (miscounted(state, sent) or "")


@pytest.mark.parametrize("absurd", [20.0, torch.nan])
def test_two_devices_together_do_not_excuse_each_other_for_ever(
    absurd: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stays just inside what is used; the other's absurd values may be its fault, but not in every round."""
    honestly = Device.answer

    def answer(self, received, sent, fields, cleared=None, codecs="fp32", **how) -> None:  # type: ignore[no-untyped-def]
        factor = {1: 5.0, 2: absurd}.get(self.member.client)
        if sent != "features" or factor is None:
            honestly(self, received, sent, fields, cleared, codecs, **how)
            return
        if self.member.client == 2 and fields["step"] == 0:
            factor = 1.0  # until the other one's values were used
        tensors = {name: tensor * factor for name, tensor in cleared.tensors.items()}
        received.stream.answer(received.ticket, [b"".join(encode(sent, fields, tensors, codecs))])

    monkeypatch.setattr(Device, "answer", answer)
    with network(tiny(5, rounds=EXCUSES + STRIKES + 1, network={"quorum": 3})) as net:
        net.join_all()
        run_rounds(net.experiment)
        assert net.strikes == {"plaintext:client-2": STRIKES}
        assert_sound(net)
