"""One device that refuses, says nothing or gives a false number must neither stop a run nor spend the others' rounds."""

from typing import Any

import pytest

from semisfl.net.server.sessions import STRIKES
from semisfl.net.server.waiting import PASSED_OVER
from semisfl.runs.loop import run_rounds
from tests.net.harness import BATCHNORM, Network, network, tiny, until

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
        assert 0 not in net.fleet.sessions.enrolled


def test_to_come_back_and_refuse_again_ends_in_quarantine() -> None:
    with network(drawn_in_pairs(3)) as net:
        net.join_all()
        penalties = net.fleet.sessions
        for attempt in range(STRIKES + 1):
            session = net.fleet.sessions.enrolled[0]
            penalties.dismiss(session, "not today")
            until(lambda: 0 not in net.fleet.present())
            assert penalties.strikes[session.identity] == attempt
            if attempt < STRIKES:
                net.join(0)
                net.wait_for(3)
        net.join(0)
        until(lambda: net.clients[0].error is not None)
        assert "in quarantine" in str(net.clients[0].error)


def test_a_device_that_never_answers_delays_one_round_in_many(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with network(drawn_in_pairs(4, deadline=4.0)) as net:
        net.join_all()
        obstruct(net, 0, refuse=False)
        assert len(run_rounds(net.experiment).rounds) == ROUNDS < PASSED_OVER
        assert net.fleet.device_log.events["left_out"] == 1
        assert begun(net) <= 2 * ROUNDS + 1
        assert 0 in net.fleet.sessions.enrolled
    assert "network.quorum = 2; left out: plaintext:client-0; missing: nobody" in caplog.text


@pytest.mark.parametrize("method", ["semisfl", "semifl"])
def test_a_device_that_never_answers_delays_one_round_in_many_above_the_quorum(method: str) -> None:
    """A device that answers shortly before each deadline is no worse; SemiFL asks twice in a round."""
    # Honest devices answer sooner, also on a busy machine.
    deadline = {"deadline": 4.0, "quorum": 2}
    config = tiny(4, rounds=4, method=method, network=deadline, model={"layers": BATCHNORM})
    with network(config) as net:
        net.join_all()
        obstruct(net, 0, refuse=False)
        assert len(run_rounds(net.experiment).rounds) == 4 < PASSED_OVER
        assert net.fleet.device_log.events["left_out"] == 1
        assert 0 in net.fleet.sessions.enrolled


def test_too_few_others_are_filled_up_with_those_that_were_passed_over_first() -> None:
    """A device that never answers would otherwise be drawn again and again once honest ones were too slow."""
    with network(drawn_in_pairs(4)) as net:
        net.join_all()
        waiting = net.fleet.waiting

        def pass_over(*clients: int) -> None:
            waiting.pass_over(map(net.fleet.roster.name, clients))

        assert net.fleet.present() == [0, 1, 2, 3]
        pass_over(1, 3)
        assert net.fleet.present() == [0, 2]
        pass_over(0)
        assert net.fleet.present() == [1, 2]
        pass_over(1)
        assert net.fleet.present() == [2, 3]
        pass_over(3)
        assert net.fleet.present() == [0, 2]
        assert net.fleet.waiting.missing() == "nobody"  # who is here and not drawn is not missing


def test_a_device_that_is_passed_over_is_drawn_where_it_is_needed() -> None:
    with network(drawn_in_pairs(3)) as net:
        net.join_all()
        net.fleet.waiting.pass_over([net.fleet.roster.name(0)])
        assert net.fleet.present() == [1, 2]
        net.clients[1].device.stop()
        until(lambda: net.fleet.present() == [0, 2])
        for _ in range(PASSED_OVER):
            net.fleet.settle(True)
        net.join(1)
        until(lambda: net.fleet.present() == [0, 1, 2])
