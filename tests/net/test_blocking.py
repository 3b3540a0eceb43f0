"""One device that refuses, says nothing or gives a false number must neither stop a run nor spend the others' rounds."""

import threading
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from semisfl.cli.main import main
from semisfl.net import chunks
from semisfl.net.client import connection, device
from semisfl.net.client.full_round import ClientFullRound
from semisfl.net.frames import Frame
from semisfl.net.server import questions
from semisfl.net.server.answer_seconds import AnswerSeconds
from semisfl.net.server.penalties import STRIKES
from semisfl.net.server.session import Patience
from semisfl.net.server.trials import PASSED_OVER
from semisfl.runs.loop import run_rounds
from tests.net.harness import BATCHNORM, Client, Network, Proxy, network, tiny, until

ROUNDS = 8


def drawn_in_pairs(clients: int, **network_settings: Any) -> Any:
    """Return a configuration in which a round below its two clients is repeated."""
    return tiny(
        clients,
        rounds=ROUNDS,
        clients={"total": clients, "active": 2, "batch": 4, "steps": 2},
        network={"quorum": 2, **network_settings},
    )


def begun(net: Network) -> int:
    """Return how many rounds the clients have spent together, those that were repeated included."""
    return sum(client.link.owner.allowance.spent.rounds for client in net.clients.values())


def obstruct(net: Network, client: int, *, refuse: bool) -> None:
    """Let a client answer every round with a refusal, or not at all; it does compute BatchNorm's statistics."""
    attacker = net.clients[client].device
    honestly = attacker._steps["full"]

    def begin(received: Any, frame: Any) -> None:
        if frame.fields.get("work") == "batchnorm-statistics":
            honestly(received, frame)
            return
        attacker.expect_round()
        if refuse:
            attacker.answer(received, "refusal", {"reason": "not today"})

    beginnings = ("split", "split_alone", "full")
    attacker._steps = {**attacker._steps, **dict.fromkeys(beginnings, begin)}


@pytest.mark.parametrize("clients", [3, 5])
def test_a_device_that_refuses_every_round_is_disconnected(clients: int) -> None:
    with network(drawn_in_pairs(clients)) as net:
        net.join_all()
        obstruct(net, 0, refuse=True)
        assert len(run_rounds(net.experiment).rounds) == ROUNDS
        assert net.fleet.device_log.events["left_out"] == 1
        assert begun(net) <= 2 * ROUNDS + 1
        assert 0 not in net.fleet._listener.table.enrolled


def test_to_come_back_and_refuse_again_ends_in_quarantine() -> None:
    with network(drawn_in_pairs(3)) as net:
        net.join_all()
        penalties = net.fleet._listener.penalties
        for attempt in range(STRIKES + 1):
            session = net.fleet._listener.table.enrolled[0]
            penalties.dismiss(session, "not today")
            until(lambda: 0 not in net.fleet.present())
            assert penalties.strikes[session.identity] == attempt
            if attempt < STRIKES:
                net.join(0)
                assert net.fleet.wait_for(3, 20)
        net.join(0)
        until(lambda: net.clients[0].error is not None)
        assert "in quarantine" in str(net.clients[0].error)


def test_a_device_that_never_answers_delays_one_round_in_many(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with network(drawn_in_pairs(4, deadline=10.0)) as net:
        net.join_all()
        obstruct(net, 0, refuse=False)
        assert len(run_rounds(net.experiment).rounds) == ROUNDS < PASSED_OVER
        assert net.fleet.device_log.events["left_out"] == 1
        assert begun(net) <= 2 * ROUNDS + 1
        assert 0 in net.fleet._listener.table.enrolled
    assert "network.quorum = 2; left out: plaintext:client-0; missing: nobody" in caplog.text


@pytest.mark.parametrize("method", ["semisfl", "fedswitch", "semifl"])
def test_a_device_that_never_answers_delays_one_round_in_many_above_the_quorum(method: str) -> None:
    """A device that answers shortly before each deadline is no worse; SemiFL asks twice in a round."""
    # Honest devices answer sooner, also on a busy machine.
    deadline = {"deadline": 10.0, "quorum": 2}
    config = tiny(4, rounds=4, method=method, network=deadline, model={"layers": BATCHNORM})
    with network(config) as net:
        net.join_all()
        obstruct(net, 0, refuse=False)
        assert len(run_rounds(net.experiment).rounds) == 4 < PASSED_OVER
        assert net.fleet.device_log.events["left_out"] == 1
        assert 0 in net.fleet._listener.table.enrolled


def test_too_few_others_are_filled_up_with_those_that_were_passed_over_first() -> None:
    """A device that never answers would otherwise be drawn again and again once honest ones were too slow."""
    with network(drawn_in_pairs(4)) as net:
        net.join_all()
        trials = net.fleet._trials
        assert net.fleet.present() == [0, 1, 2, 3]
        trials.pass_over([1, 3])
        assert net.fleet.present() == [0, 2]
        trials.pass_over([0])
        assert net.fleet.present() == [1, 2]
        trials.pass_over([1])
        assert net.fleet.present() == [2, 3]
        trials.pass_over([3])
        assert net.fleet.present() == [0, 2]
        assert net.fleet.waiting.missing() == "nobody"  # who is here and not drawn is not missing


def test_a_device_that_leaves_between_two_questions_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It answers a step, and is back on a new connection before the slower ones have answered."""
    monkeypatch.setattr(connection, "FIRST_DELAY", 0.02)
    with network(drawn_in_pairs(5)) as net:
        proxy = Proxy(net.address)

        def think(_client: Client, frame: Frame) -> None:
            if frame.kind == "split":
                time.sleep(0.3)

        for index in range(1, 5):
            net.join(index, break_at=think)
        net.join(0, f"127.0.0.1:{proxy.port}")
        assert net.fleet.wait_for(5, 20)
        attacker = net.clients[0].device
        honestly = attacker.answer

        def answer(received: Any, kind: str, *parts: Any, **how: Any) -> None:
            honestly(received, kind, *parts, **how)
            if kind == "features":
                threading.Timer(0.05, proxy.cut).start()

        monkeypatch.setattr(attacker, "answer", answer)
        threading.Timer(30, net.experiment.stop.request).start()
        assert len(run_rounds(net.experiment).rounds) == ROUNDS
        assert begun(net) <= 2 * ROUNDS + 2
        assert net.fleet.roster.name(0) in net.fleet._trials._passed_over
        proxy.close()


def test_a_device_that_answers_just_before_each_deadline_delays_one_round_in_many(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(chunks, "LOWEST_RATE", 1e9)
    config = tiny(4, rounds=3, clients={"steps": 4}, network={"deadline": 3.0, "quorum": 3})

    def late(_client: Client, frame: Frame) -> None:
        if frame.kind in ("split", "gradients"):
            time.sleep(2.0)

    with network(config) as net:
        net.join(0, break_at=late)
        for index in range(1, 4):
            net.join(index)
        assert net.fleet.wait_for(4, 20)
        # It must be found too slow however long the others take on a busy machine.
        monkeypatch.setattr(questions, "SLOWEST", 0.0)
        rounds = run_rounds(net.experiment).rounds
        assert [metrics["contributing"] for metrics in rounds] == [3, 3, 3]
        assert net.fleet.device_log.events["left_out"] == 1
        assert "client-0 is left out of this round: its answers of this round took" in caplog.text
        assert not net.strikes
        assert 0 in net.fleet._listener.table.enrolled


def test_the_operator_learns_which_device_makes_the_rounds_slow(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It answers within every deadline, and in less than one deadline over the whole round: it is not left out."""

    def late(_client: Client, frame: Frame) -> None:
        if frame.kind in ("split", "gradients"):
            time.sleep(0.5)

    with network(tiny(3, rounds=3, network={"deadline": 10.0, "quorum": 3})) as net:
        net.fleet.open(tmp_path)
        (tmp_path / "config.toml").touch()
        for index in range(3):
            net.join(index, break_at=late if index == 1 else None)
        assert net.fleet.wait_for(3, 20)
        run_rounds(net.experiment)
        slow = {device.name: device.answer_seconds or 0.0 for device in net.fleet.devices()}
        assert main(["fleet", str(tmp_path), "list"]) == 0
    name = "plaintext:client-1"
    assert max(slow, key=slow.__getitem__) == name and 1.5 <= slow[name] < 10
    listed = capsys.readouterr().out
    assert f"longest to answer in the last round: {name}, {slow[name]:.2f} s" in listed
    assert caplog.text.count(f"{name} makes the rounds slow: its answers of this round took") == 1
    assert net.fleet.device_log.events["left_out"] == 0


def test_a_round_without_a_slow_device_names_nobody(caplog: pytest.LogCaptureFixture) -> None:
    answers = AnswerSeconds(deadline=10.0)
    for seconds in ({"a": 9.0}, {"a": 3.0, "b": 2.1}, {"a": 1.1, "b": 0.2}, {"a": 3.0, "b": 1.1}):
        for name, took in seconds.items():
            answers.add(name, took)
        answers.end_round()
        assert answers.last == seconds
    assert not caplog.records


def test_a_device_is_as_slow_as_its_link_and_ten_times_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three devices have answered in 4, 5 and 6 s; the fourth is judged when it has worked for 100 s."""

    def left_out(*, deadline: float, size: int, answered: int = 3) -> set[int]:
        asking = object.__new__(questions.Questions)
        patience = Patience(deadline, 1, size, asked_at=1000.0, progress=1000.0)
        session = SimpleNamespace(patience=patience, abandon=lambda _: None)
        asking._awaited = {9: SimpleNamespace(session=session)}  # type: ignore[dict-item]
        asking._times = defaultdict(questions.AnswerTimes)
        asking._times[9] = questions.AnswerTimes(0.0, size / chunks.LOWEST_RATE)
        for client in range(answered):
            asking._times[client].seconds = 4.0 + client
        asking.too_slow = set()
        monkeypatch.setattr(asking, "_leave_out", lambda *_: None)
        asking._leave_out_slow(1100.0)
        return asking.too_slow

    assert left_out(deadline=49, size=0) == {9}
    assert left_out(deadline=51, size=0) == set()
    assert left_out(deadline=49, size=int(2 * chunks.LOWEST_RATE)) == set()
    assert left_out(deadline=1, size=0, answered=1) == set(), "two devices: nobody says who is slow"


def test_a_device_whose_round_is_given_up_is_not_called_slow(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another device left while this one was still being sent its question."""
    with network(tiny(1)) as net:
        net.join_all()
        session, frames = net.fleet._listener.table.enrolled[0], net.clients[0].device
        # Its last frame of joining has come, and the server is done with it.
        until(lambda: frames.joined is not None and frames.joined.client == 0)
        until(lambda: session._writing is None)
        session._writing = 1
        net.fleet._questions._awaited[0] = SimpleNamespace(session=session)  # type: ignore[assignment]
        net.fleet._questions.give_up()
        until(lambda: "; next attempt in" in caplog.text)
        assert "(the round was given up; the next one needs a new connection)" in caplog.text


def test_a_device_that_is_passed_over_is_drawn_where_it_is_needed() -> None:
    with network(drawn_in_pairs(3)) as net:
        net.join_all()
        net.fleet._trials.pass_over([0])
        assert net.fleet.present() == [1, 2]
        net.clients[1].device.stop()
        until(lambda: net.fleet.present() == [0, 2])
        for _ in range(PASSED_OVER):
            net.fleet.settle(True)
        net.join(1)
        until(lambda: net.fleet.present() == [0, 1, 2])


@pytest.mark.parametrize("method", ["fedswitch", "fedmatch", "fl2"])
@pytest.mark.parametrize("number", ["loss", "loss_consistency"])
def test_a_false_loss_is_left_out_and_the_run_goes_on(
    method: str, number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(5, method=method, rounds=6, network={"quorum": 2})
    with network(config) as net:
        net.join_all()
        attacker = net.clients[4].device

        class FalseRound(ClientFullRound):
            def _upload(self, numbers: Any, states: Any) -> None:
                super()._upload({**numbers, number: 1e6} if number in numbers else numbers, states)

        def round_of(frames: Any, *parts: Any) -> ClientFullRound:
            return (FalseRound if frames is attacker else ClientFullRound)(frames, *parts)

        monkeypatch.setattr(device, "ClientFullRound", round_of)
        assert len(run_rounds(net.experiment).rounds) == 6
        assert set(net.strikes) == {"plaintext:client-4"}
