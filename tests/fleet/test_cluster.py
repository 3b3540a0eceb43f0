"""Clients on several ranks: the numbers of one process, and an end that reaches all of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from semisfl.fleet.base import ClientResult, ClientWork, FullRound, SplitRound
from semisfl.fleet.cluster.cluster_fleet import ClusterFleet
from semisfl.fleet.cluster.plans import blocks_of
from semisfl.fleet.packing import outline, pack, room_for, unpack
from semisfl.models.build import build_model
from semisfl.runs.experiment import Experiment, assemble
from semisfl.runs.loop import run_rounds
from semisfl.settings.config import ConfigError
from semisfl.stopping import Stopped
from tests.fleet import rank_process
from tests.fleet.test_every_fleet import FLEETS
from tests.net.harness import BATCHNORM, tiny, toy_data, weights
from tests.toy import but_for_time


def test_blocks_are_equal_and_the_server_has_the_smallest() -> None:
    assert blocks_of(range(8), 4) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert blocks_of((3, 5, 9, 11, 12), 2) == [(3, 5), (9, 11, 12)]
    assert blocks_of((1, 4), 4) == [(), (), (1,), (4,)]
    assert blocks_of((), 2) == [(), ()]


def test_states_arrive_with_their_values_and_layout() -> None:
    state = {
        "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "count": torch.tensor(7),
        "part": torch.randn(6, 4)[:, 1:3],
        "none": torch.empty(0),
    }
    outlines = [outline(state), outline({"one": state["last"][:1]})]
    sent = pack([state, {"one": state["last"][:1]}])
    room = room_for(outlines, torch.device("cpu"))
    for place, tensor in zip(room, sent, strict=True):
        place.copy_(tensor)
    arrived = unpack(outlines, room)
    for name, tensor in state.items():
        assert torch.equal(arrived[0][name], tensor) and arrived[0][name].dtype == tensor.dtype
    assert arrived[0]["last"].stride() == state["last"].stride()
    assert torch.equal(arrived[1]["one"], state["last"][:1])


def test_caps_are_counted_for_the_clients_of_every_rank() -> None:
    with FLEETS["two ranks"](tiny(3, rounds=2, policy={"uses_per_image": 1})) as fixture:
        fleet = fixture.experiment.fleet
        assert len(fleet.present()) == 3
        fixture.experiment.method.round(0)
        assert not fleet.present()
        with pytest.raises(ValueError, match="no client is left: an image"):
            fleet.wait_ready()


CASES: dict[str, dict[str, Any]] = {
    "semisfl": {
        "model": {"layers": BATCHNORM},
        "teacher": {"ema_decay": 0.5},
        "semisfl": {"client_teacher": "ema"},
    },
    "semisfl, coded": {"wire": {"models": "int8", "student_features": "fp16", "gradients": "int8"}},
    "semisfl, median": {"robust": {"aggregate": "median"}},
    "fedswitch-sl": {},
    "fedswitch": {"wire": {"models": "fp16"}},
    "semifl": {"semifl": {"confidence_threshold": 0.0}, "model": {"layers": BATCHNORM}},
    "fl2": {"model": {"layers": BATCHNORM}},
    "fedmatch": {},
    "fedmatch, coded": {"wire": {"models": "fp16"}},
    "semisfl, frozen": {"clients": {"bottom": "frozen"}, "wire": {"student_features": "int8"}},
}


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        *((case, "two ranks") for case in CASES),
        ("semisfl", "four ranks"),
        ("fedmatch", "four ranks"),
        ("semisfl, frozen", "four ranks"),
    ],
)
def test_a_run_is_that_of_one_process_to_the_last_bit(
    case: str, ranks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With four ranks, rank 0 has no client."""
    monkeypatch.setattr("semisfl.methods.fedmatch.method.REFRESH", 2)
    method = case.partition(",")[0]
    changes = dict(CASES[case])
    clients = {"active": 3, **changes.pop("clients", {})}
    config = tiny(5, method=method, rounds=2, clients=clients, **changes)
    result = []
    for kind in ("local", ranks):
        with FLEETS[kind](config) as fixture:
            # A client's images are then encoded by several ranks, and the rows are the same.
            monkeypatch.setattr("semisfl.fleet.frozen.TOGETHER", 128 if kind == "local" else 5)
            rows = but_for_time(run_rounds(fixture.experiment).rounds)
            counts = dict(fixture.experiment.fleet.traffic.counts)
            result.append((rows, counts, weights(fixture.experiment)))
    local, cluster = result
    assert local[0] == cluster[0] and local[1] == cluster[1]
    assert local[2].keys() == cluster[2].keys()
    for name, value in local[2].items():
        assert torch.equal(value, cluster[2][name]), name


def stopping(experiment: Experiment) -> Callable[[ClientWork, FullRound], list[ClientResult]]:
    """A full-model round in which rank 0 is asked to stop when the others have begun."""
    train = experiment.fleet.train

    def stopped(work: ClientWork, plan: FullRound) -> list[ClientResult]:
        experiment.stop.request()
        return train(work, plan)

    return stopped


def test_a_round_that_was_given_up_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features and results that were on their way are taken and forgotten, and not counted."""
    result = []
    for kind in ("local", "two ranks"):
        config = tiny(3, method="fedswitch")
        with FLEETS[kind](config) as fixture:
            experiment = fixture.experiment
            data, _ = toy_data(3)
            model = build_model(config, data.shape, len(data.classes))
            bottom = model.bottom.state_dict()
            before = experiment.state_dict()
            experiment.fleet.start_round(SplitRound(0, (0, 1, 2), 2, 0.05, bottom, bottom))
            experiment.undo_round(before)
            with monkeypatch.context() as patch, pytest.raises(Stopped):
                patch.setattr(experiment.fleet, "train", stopping(experiment))
                experiment.method.round(0)
            experiment.stop.requested = False
            experiment.undo_round(before)
            experiment.method.round(0)
            result.append((experiment.fleet.traffic.counts, weights(experiment)))
    (counts, ours), (their_counts, theirs) = result
    assert counts == their_counts
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def test_ranks_with_other_images_are_refused() -> None:
    config = tiny(3)
    data, partition = toy_data(3, seed=1)
    ranks = rank_process.there()
    experiment = assemble(
        config, data, partition, make_fleet=lambda setup: ClusterFleet(setup, ranks.start(2))
    )
    with pytest.raises(ConfigError, match=r"rank 1: .* holds other images here than for rank 0"):
        experiment.fleet.open(None)
    experiment.fleet.close(finished=False)
    assert ranks.all_answer()


def test_without_torchrun_it_is_refused() -> None:
    data, partition = toy_data(3)
    with pytest.raises(ConfigError, match="needs the ranks of torchrun: start it with torchrun"):
        assemble(tiny(3, fleet={"kind": "cluster"}), data, partition)
