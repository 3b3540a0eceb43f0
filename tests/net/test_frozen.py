"""A frozen bottom over the network: devices send the rows of their images once, and the server trains on its files."""

from typing import Any

from semisfl.fleet.frozen import FrozenFleet
from semisfl.runs.experiment import Experiment, assemble
from semisfl.runs.loop import run_rounds
from tests.net.harness import assert_same, network, tiny, toy_data


def frozen(count: int = 3, **changes: Any) -> Any:
    clients = {"bottom": "frozen", "weak_views": 2, "strong_views": 3}
    clients |= changes.pop("clients", {})
    return tiny(count, clients=clients, **changes)


class NamedClients(FrozenFleet):
    """Simulated clients with the names of `Network`'s devices."""

    def members(self) -> dict[int, str]:
        return {client: f"plaintext:client-{client}" for client in super().members()}


def simulated(config: Any) -> Experiment:
    data = toy_data(config.clients.total)
    experiment = assemble(config, *data, device="cpu", make_fleet=NamedClients)
    experiment.fleet.open(None)
    run_rounds(experiment)
    return experiment


def test_a_run_is_the_simulated_one() -> None:
    config = frozen()
    with network(config) as net:
        for client in range(3):
            net.join(client)
        for client in range(3):
            net.clients[client].join(30)
            assert net.clients[client].error is None
        run_rounds(net.experiment)
        other = simulated(config)
        assert_same(net.experiment, other)
        assert net.fleet.traffic.counts == other.fleet.traffic.counts
