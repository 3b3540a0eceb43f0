"""What a plan says, real runs send: to the byte, by kind and client, simulated and over a network."""

from collections import Counter

import pytest

from semisfl.catalog import METHODS
from semisfl.config import Config
from semisfl.costs.rounds import Priced
from tests.fleet.test_every_fleet import BATCHNORM, FLEETS, Fixture, Make
from tests.net.harness import tiny, toy_data

WIRES = {
    "fp32": {},
    "codecs": {
        "student_features": "int8",
        "teacher_features": "fp16",
        "gradients": "bf16",
        "models": "int8",
    },
}
Counts = Counter[tuple[str, str, int]]


def settings(method: str, wire: str) -> Config:
    """With clients that all contribute, and are all labelled for by the teacher."""
    return tiny(
        2,
        method=method,
        rounds=3,
        model={"layers": BATCHNORM},
        wire=WIRES[wire],
        semifl={"confidence_threshold": 0.0},
        fedswitch={"iid_threshold": 99.0},
        fedmatch={"refresh": 2, "helpers": 1},
    )


def third_round(fixture: Fixture) -> Counts:
    """Neither the first, which may greet, nor one in which helpers are chosen: a usual one."""
    fleet, method = fixture.experiment.fleet, fixture.experiment.method
    before: Counts = Counter()
    for index in range(3):
        before = Counter(fleet.traffic.counts)
        fleet.wait_ready()
        method.round(index)
    return Counter(fleet.traffic.counts) - before


@pytest.mark.parametrize("make", FLEETS.values(), ids=FLEETS)
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("method", METHODS)
def test_a_usual_round_is_the_formulas(method: str, wire: str, make: Make) -> None:
    data, _ = toy_data(2)
    with make(settings(method, wire)) as fixture:
        sent = third_round(fixture)
        config = fixture.experiment.config
    cost = Priced.of(config, data.shape, len(data.classes), 12).usual
    assert cost is not None
    for client in range(2):
        found = {f"{kind}_{way}": size for (kind, way, who), size in sent.items() if who == client}
        assert found == cost.by_kind()
    assert bool(cost.total) is (method != "supervised")
