"""One device that refuses, says nothing or gives a false number must neither stop a run nor spend the others' rounds."""

from typing import Any

import pytest

from semisfl.net.client import device
from semisfl.net.client.full_round import ClientFullRound
from semisfl.net.server.penalties import STRIKES
from semisfl.net.server.trials import PASSED_OVER
from semisfl.runs.loop import run_rounds
from tests.net.harness import Network, network, tiny, until

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
    """Let a client answer every round with a refusal, or not at all."""
    attacker = net.clients[client].device

    def begin(received: Any, frame: Any) -> None:
        attacker.expect_round()
        if refuse:
            attacker.answer(received, "refusal", {"reason": "not today"})

    attacker._steps = {**attacker._steps, "split": begin, "split_alone": begin}


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
        for time in range(STRIKES + 1):
            session = net.fleet._listener.table.enrolled[0]
            penalties.dismiss(session, "not today")
            until(lambda: 0 not in net.fleet.present())
            assert penalties.strikes[session.identity] == time
            if time < STRIKES:
                net.join(0)
                assert net.fleet.wait_for(3, 20)
        net.join(0)
        until(lambda: net.clients[0].error is not None)
        assert "in quarantine" in str(net.clients[0].error)


def test_a_device_that_never_answers_delays_one_round_in_many() -> None:
    with network(drawn_in_pairs(4, deadline=1.0)) as net:
        net.join_all()
        obstruct(net, 0, refuse=False)
        assert len(run_rounds(net.experiment).rounds) == ROUNDS < PASSED_OVER
        assert net.fleet.device_log.events["left_out"] == 1
        assert begun(net) <= 2 * ROUNDS + 1
        assert 0 in net.fleet._listener.table.enrolled


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
            def upload(self, numbers: Any, states: Any) -> None:
                super().upload({**numbers, number: 1e6} if number in numbers else numbers, states)

        def round_of(one: Any, *parts: Any) -> ClientFullRound:
            return (FalseRound if one is attacker else ClientFullRound)(one, *parts)

        monkeypatch.setattr(device, "ClientFullRound", round_of)
        assert len(run_rounds(net.experiment).rounds) == 6
        struck = {name for name, count in net.fleet._listener.penalties.strikes.items() if count}
        assert struck == {"plaintext:client-4"}
