"""Test that real runs send what plans and replays compute: to the byte, by kind, client and round, simulated
and over a network, with and without codecs."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest

from semisfl.costs.clock import World
from semisfl.costs.plan import make
from semisfl.costs.replay import recode_traffic, traffic_of
from semisfl.costs.rounds import ImageFacts, RoundCosts
from semisfl.metrics import RoundMetrics
from semisfl.runs.experiment import assemble
from semisfl.runs.loop import run_rounds
from semisfl.settings.catalog import METHODS
from semisfl.settings.config import Config, parse
from tests.fleet.test_every_fleet import BATCHNORM, FLEETS
from tests.fleet.test_frozen import frozen
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
every_run = pytest.mark.parametrize(
    ("fleet", "method"),
    [
        *((fleet, method) for fleet in ("local", "network") for method in METHODS),
        # Ranks count as one process does: tests/fleet/test_cluster.py has every method.
        *(("two ranks", method) for method in ("semisfl", "fedmatch")),
    ],
)


@pytest.fixture(scope="module", autouse=True)
def one_helper_every_second_round() -> Iterator[None]:
    """Let FedMatch choose one helper every second round, so that two clients and three rounds have a choice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("semisfl.methods.fedmatch.method.REFRESH", 2)
        patch.setattr("semisfl.methods.fedmatch.method.HELPERS", 1)
        patch.setattr("semisfl.methods.fedmatch.settings.HELPERS", 1)
        yield


def settings(method: str, wire: str, threshold: float = 0.0) -> Config:
    """Return settings under which all clients contribute and the teacher labels for all of them."""
    return tiny(
        2,
        method=method,
        rounds=3,
        model={"layers": BATCHNORM},
        wire=WIRES[wire],
        semifl={"confidence_threshold": threshold},
        fedswitch={"iid_threshold": 99.0},
        fedmatch={"confidence_threshold": threshold or 0.95},
        runtime={"evaluate_every": 3},
    )


@cache
def finished(fleet: str, method: str, wire: str) -> tuple[list[RoundMetrics], Counts, RoundCosts]:
    """Return a run's rounds, the totals that its fleet counted, and its price."""
    data, _ = toy_data(2)
    with FLEETS[fleet](settings(method, wire)) as fixture:
        experiment = fixture.experiment
        rows = [RoundMetrics.from_dict(row) for row in run_rounds(experiment).rounds]
        counts = Counter(experiment.fleet.traffic.counts)
        images = ImageFacts(data.shape, len(data.classes), 12)
        return rows, counts, RoundCosts.of(experiment.config, images)


@every_run
@pytest.mark.parametrize("wire", WIRES)
def test_a_usual_round_is_the_formulas(fleet: str, method: str, wire: str) -> None:
    """The third round is a usual one: the first may send more, and so may one that chooses helpers."""
    rows, _, priced = finished(fleet, method, wire)
    cost = priced.usual
    assert cost is not None and bool(cost.total) is (method not in ("supervised", "probe"))
    third = traffic_of(rows, priced)[2]
    assert third.exact
    assert third.clients == (dict.fromkeys(range(2), cost.by_kind()) if cost.total else {})


@every_run
def test_rounds_add_up_to_what_the_fleet_counted(fleet: str, method: str) -> None:
    rows, counts, priced = finished(fleet, method, "codecs")
    added: Counts = Counter()
    for one in traffic_of(rows, priced):
        for client, sizes in one.clients.items():
            added.update({(*kind.split("_"), client): size for kind, size in sizes.items()})
    assert added == counts
    assert sum(added.values()) == rows[-1].bytes_total


@every_run
def test_recoding_gives_what_a_run_with_these_codecs_sends(fleet: str, method: str) -> None:
    plain, _, was = finished(fleet, method, "fp32")
    coded, _, now = finished(fleet, method, "codecs")
    replayed = [recode_traffic(one, was, now) for one in traffic_of(plain, was)]
    assert replayed == traffic_of(coded, now)
    back = [recode_traffic(one, now, was) for one in replayed]
    assert back == traffic_of(plain, was)


@every_run
def test_bytes_of_clients_are_computed_from_the_total(fleet: str, method: str) -> None:
    """All clients do the same here, so computed bytes can be compared with recorded ones."""
    rows, _, priced = finished(fleet, method, "fp32")
    totals = [replace(row, bytes_by_client=None, bytes=None) for row in rows]
    for one, recorded in zip(traffic_of(totals, priced), traffic_of(rows, priced), strict=True):
        assert one.clients == recorded.clients
        assert one.exact is not bool(one.clients)


@pytest.mark.parametrize(("method", "uploads"), [("fedmatch", True), ("semifl", False)])
def test_a_client_without_confident_images_uploads_only_in_fedmatch(
    method: str, uploads: bool
) -> None:
    with FLEETS["local"](settings(method, "fp32", threshold=1.0)) as fixture:
        experiment = fixture.experiment
        metrics = [RoundMetrics.from_dict(one) for one in run_rounds(experiment).rounds]
    data, _ = toy_data(2)
    priced = RoundCosts.of(experiment.config, ImageFacts(data.shape, len(data.classes), 12))
    for client in traffic_of(metrics, priced)[2].clients.values():
        assert (client.get("model_up", 0) >= priced.sizes.full) is uploads
        assert client["model_down"] >= priced.sizes.full


@pytest.mark.parametrize("method", ["semisfl", "fedswitch-sl", "supervised"])
def test_a_frozen_bottom_goes_down_once_and_rows_come_up_once_as_the_formula_says(
    method: str,
) -> None:
    """Three clients with unequal numbers of images, two of them in a round."""
    data, partition = toy_data(3)
    first, *others = partition.clients
    partition = replace(partition, clients=(first[:7], *others))
    each = {client: len(images) for client, images in enumerate(partition.clients)}
    ran: dict[str, tuple[list[RoundMetrics], RoundCosts]] = {}
    for wire, codecs in WIRES.items():
        values = {**frozen(3, method=method, rounds=9, wire=codecs).model_dump(), "fleet": {}}
        values["clients"]["active"], values["server"]["pretrain_rounds"] = 2, 1
        experiment = assemble(parse(values), data, partition, device="cpu")
        experiment.fleet.open(None)
        rows = [RoundMetrics.from_dict(row) for row in run_rounds(experiment).rounds]
        experiment.fleet.close(finished=True)
        facts = ImageFacts.of_each(data.shape, len(data.classes), each)
        ran[wire] = rows, RoundCosts.of(experiment.config, facts)
    for rows, priced in ran.values():
        traffic = traffic_of(rows, priced)
        assert bool(traffic[1].clients) is priced.once is (method != "supervised")
        sent: dict[int, dict[str, int]] = {}
        for one in traffic:
            assert not sent.keys() & one.clients.keys(), "a client sent twice"
            sent.update({client: dict(sizes) for client, sizes in one.clients.items()})
        down, row = priced.sizes.bottom, priced.image_bytes()
        assert sent == {
            client: {"features_up": each[client] * row, "model_down": down}
            for client in (each if priced.once else ())
        }
        totals = [replace(one, bytes_by_client=None, bytes=None) for one in rows]
        for one, recorded in zip(traffic_of(totals, priced), traffic, strict=True):
            assert one.total == recorded.total and one.clients.keys() == recorded.clients.keys()
        planned = make(priced.config, priced.images, World.of("1", "1", 0, "wire-only"))
        own = next(line for line in planned.methods if line.method == method)
        whole = sum(size for sizes in sent.values() for size in sizes.values())
        assert planned.run_bytes(own) == pytest.approx(whole, abs=3)
        if own.once:
            assert own.image_bytes["int8"] == 5 * (priced.cut.features + 4)
    (plain, was), (coded, now) = ran.values()
    replayed = [recode_traffic(one, was, now) for one in traffic_of(plain, was)]
    assert replayed == traffic_of(coded, now)
