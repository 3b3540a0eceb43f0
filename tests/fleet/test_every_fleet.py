"""Test the promises of a fleet on every kind of fleet, against the plain twin.

A further kind of fleet joins by an entry in `FLEETS`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from semisfl.fleet.base import Fleet, SplitRound, mean_state
from semisfl.fleet.cluster.cluster_fleet import ClusterFleet, FrozenClusterFleet
from semisfl.fleet.setup import FleetSetup
from semisfl.methods import fedswitch_settings, semisfl_settings
from semisfl.methods.semifl import settings as semifl_settings
from semisfl.methods.semisfl import SemiSFL
from semisfl.methods.sizes import Cost
from semisfl.models.build import build_model
from semisfl.runs import checkpoint
from semisfl.runs.experiment import Experiment, assemble
from semisfl.runs.loop import run_rounds
from semisfl.settings.config import Config
from semisfl.settings.run import WireConfig
from tests.fleet import rank_process
from tests.net.harness import BATCHNORM, Network, network, tiny, toy_data, until
from tests.sizes import sizes_of
from tests.twin import PlainTwin, largest_difference


@dataclass
class Fixture:
    """A fleet with all its clients there, and the run around it."""

    experiment: Experiment
    lose: Callable[[int], None] | None
    """Make a client vanish without a word; None where clients cannot."""
    ended: Callable[[], bool]
    """Whether every client has understood that the run is over."""


@contextmanager
def local(config: Config) -> Iterator[Fixture]:
    data, partition = toy_data(config.clients.total)
    experiment = assemble(config, data, partition, device="cpu")
    experiment.fleet.open(None)
    yield Fixture(experiment, None, lambda: True)


@contextmanager
def over_network(config: Config) -> Iterator[Fixture]:
    with network(config) as net:
        net.join_all()
        yield Fixture(net.experiment, lambda client: _lose(net, client), lambda: _ended(net))


def _lose(net: Network, client: int) -> None:
    net.clients[client].kill()
    until(lambda: client not in net.fleet.present())


def _ended(net: Network) -> bool:
    for client in net.clients.values():
        client.join(30)
    return not any(client.is_alive() or client.error for client in net.clients.values())


@contextmanager
def on_ranks(config: Config, count: int) -> Iterator[Fixture]:
    data, partition = toy_data(config.clients.total)
    ranks = rank_process.there()

    def make(setup: FleetSetup) -> Fleet:
        frozen = config.clients.bottom == "frozen"
        return (FrozenClusterFleet if frozen else ClusterFleet)(setup, ranks.start(count))

    experiment = assemble(config, data, partition, device="cpu", make_fleet=make)
    experiment.fleet.open(None)
    try:
        yield Fixture(experiment, None, ranks.all_answer)
    finally:
        experiment.fleet.close(finished=True)


Make = Callable[[Config], AbstractContextManager[Fixture]]
FLEETS: dict[str, Make] = {
    "local": local,
    "network": over_network,
    "two ranks": partial(on_ranks, count=2),
    "four ranks": partial(on_ranks, count=4),
}
every_fleet = pytest.mark.parametrize("make", FLEETS.values(), ids=FLEETS)
CASES: dict[str, dict] = {
    "plain": {},
    "some are active": {"clients": {"active": 2}},
    "batchnorm": {"model": {"layers": BATCHNORM}},
    "batchnorm, teachers that follow": {
        "model": {"layers": BATCHNORM},
        "teacher": {"ema_decay": 0.5},
        "semisfl": {"client_teacher": "ema"},
    },
    "half-precision features": {"wire": {"student_features": "fp16", "gradients": "fp16"}},
}


@pytest.mark.parametrize(
    ("make", "case"),
    [
        pytest.param(make, case, id=f"{name}-{case}")
        for name, make in FLEETS.items()
        for case in (CASES if name != "four ranks" else ["some are active"])
    ],
)
def test_rounds_are_those_of_the_plain_twin(make: Make, case: str) -> None:
    config = tiny(3, **CASES[case])
    data, partition = toy_data(3)
    with make(config) as fixture:
        method = fixture.experiment.method
        assert isinstance(method, SemiSFL)
        twin = PlainTwin(config, method.student, data, partition)
        for index in range(config.rounds):
            fixture.experiment.fleet.wait_ready()
            ours, theirs = method.round(index), twin.round(index)
            for name, value in theirs.items():
                assert getattr(ours, name) == pytest.approx(value, abs=1e-4), name
        for mine, plain in ((method.student, twin.student), (method.teacher, twin.teacher)):
            assert largest_difference(mine.state_dict(), plain.state_dict()) < 1e-4
        start = build_model(config, data.shape, len(data.classes)).state_dict()
        assert largest_difference(method.student.state_dict(), start) > 0.01


@every_fleet
@pytest.mark.parametrize("method", ["semisfl", "semifl", "fedswitch"])
def test_every_client_sends_what_the_formula_says(make: Make, method: str) -> None:
    config = tiny(3, method=method, rounds=1, semifl={"confidence_threshold": 0.0})
    data, _ = toy_data(3)
    model = build_model(config, data.shape, len(data.classes))
    sizes = sizes_of(model, config.clients.batch, config.clients.steps)
    with make(config) as fixture:
        fixture.experiment.fleet.wait_ready()
        fixture.experiment.method.round(0)
        counts = fixture.experiment.fleet.traffic.counts
    # FedSwitch's clients take the teacher only if they label with it: what they took is allowed.
    costs: list[Cost] = {
        "semisfl": lambda: [
            semisfl_settings.cost(sizes, config.settings(semisfl_settings.SemiSFLSettings))
        ],
        "semifl": lambda: [
            semifl_settings.cost(sizes, config.settings(semifl_settings.SemiFLSettings))
        ],
        "fedswitch": lambda: [
            fedswitch_settings.cost(
                sizes, config.settings(fedswitch_settings.FedSwitchSettings), teacher=used
            )
            for used in (False, True)
        ],
    }[method]()
    for client in range(3):
        down, up = (
            sum(n for (_, way, sender), n in counts.items() if (way, sender) == (direction, client))
            for direction in ("down", "up")
        )
        assert (down, up) in [(cost.down, cost.up) for cost in costs], client


@every_fleet
def test_fleets_agree_on_full_model_rounds(make: Make) -> None:
    """To the last bit with the clients of this process, whose steps tests elsewhere hold to PyTorch's.

    A client ends its round after the three steps of a pass, of five.
    """
    config = tiny(3, method="fedswitch", clients={"steps": 5, "epochs": 1})
    data, partition = toy_data(3)
    reference = assemble(config, data, partition, device="cpu")
    with make(config) as fixture:
        for index in range(config.rounds):
            fixture.experiment.fleet.wait_ready()
            ours, theirs = fixture.experiment.method.round(index), reference.method.round(index)
            assert ours.loss_supervised == theirs.loss_supervised
            assert ours.loss_semi == theirs.loss_semi
        assert fixture.experiment.fleet.traffic.counts == reference.fleet.traffic.counts


@pytest.mark.parametrize("method", ["semisfl", "fedswitch-sl", "fedswitch", "semifl", "fedmatch"])
def test_coded_models_are_the_same_in_a_simulation_and_on_devices(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent, what a client still holds and what comes back: to the last bit."""
    monkeypatch.setattr("semisfl.methods.fedmatch.method.REFRESH", 2)
    config = tiny(
        3,
        method=method,
        rounds=3,
        wire=dict.fromkeys(WireConfig.model_fields, "int8"),
        model={"layers": BATCHNORM},
        semisfl={"client_teacher": "ema"},
        fedswitch={"confidence_threshold": 0.2, "iid_threshold": 0.05},
        semifl={"confidence_threshold": 0.2},
        fedmatch={"confidence_threshold": 0.2},
    )
    metrics, weights = [], []
    for make in (local, over_network):
        with make(config) as fixture:
            metrics.append(run_rounds(fixture.experiment).rounds)
            tested = fixture.experiment.method.tested()
            states = {name: model.state_dict() for name, model in tested.items()}
            weights.append(checkpoint.digest(states))
    for row, other in zip(*metrics, strict=True):
        losses = {key for key in row if key.startswith("loss_")}
        assert {key: row[key] for key in losses} == {key: other[key] for key in losses}
    assert weights[0] == weights[1]


@every_fleet
def test_clients_that_fail_to_answer_are_not_in_the_results(make: Make) -> None:
    """Features name those who answered, and the mean of the bottoms is theirs."""
    config = tiny(3)
    with make(config) as fixture:
        fleet = fixture.experiment.fleet
        assert list(fleet.present()) == [0, 1, 2]
        data, _ = toy_data(3)
        bottom = build_model(config, data.shape, len(data.classes)).bottom.state_dict()
        fleet.start_round(SplitRound(0, (0, 1, 2), 2, 0.02, bottom, bottom))
        features = fleet.forward()
        assert features.clients == (0, 1, 2) and features.batch == config.clients.batch
        left = (0, 1, 2)
        if fixture.lose is not None:
            fixture.lose(1)
            left = (0, 2)
        fleet.backward(0.1 * torch.ones_like(features.student))
        features = fleet.forward()
        assert features.clients == left
        assert len(features.student) == len(left) * config.clients.batch
        fleet.backward(0.1 * torch.ones_like(features.student))
        mean = fleet.finish_round()
        alone = [_alone(config, client) for client in left]
        assert largest_difference(mean, mean_state(alone)) < 1e-5
        uploads = {
            client for kind, way, client in fleet.traffic.counts if (kind, way) == ("model", "up")
        }
        assert uploads == set(left)


def _alone(config: Config, client: int) -> dict[str, torch.Tensor]:
    """The bottom of one client of this process that is given the same gradients."""
    with local(config) as fixture:
        data, _ = toy_data(3)
        bottom = build_model(config, data.shape, len(data.classes)).bottom.state_dict()
        fleet = fixture.experiment.fleet
        fleet.start_round(SplitRound(0, (client,), 2, 0.02, bottom, bottom))
        for _ in range(2):
            fleet.backward(0.1 * torch.ones_like(fleet.forward().student))
        return fleet.finish_round()


@every_fleet
def test_state_goes_through_a_checkpoint_into_a_fresh_fleet(make: Make, tmp_path: Path) -> None:
    config = tiny(3)
    with make(config) as fixture:
        fleet = fixture.experiment.fleet
        assert fleet.image_counts() == {0: 12, 1: 12, 2: 12}
        checkpoint.write(tmp_path / "state.safetensors", {"fleet": fleet.state_dict()})
    with make(config) as fixture:
        state = checkpoint.read(tmp_path / "state.safetensors")["fleet"]
        fixture.experiment.fleet.load_state_dict(state)
        assert fixture.experiment.fleet.state_dict() == state
        fixture.experiment.fleet.load_state_dict({})  # as in checkpoints that know of none
        assert fixture.experiment.fleet.state_dict() == state


@every_fleet
def test_clients_of_a_finished_run_end(make: Make) -> None:
    with make(tiny(2)) as fixture:
        fixture.experiment.fleet.close(finished=True)
        assert fixture.ended()
