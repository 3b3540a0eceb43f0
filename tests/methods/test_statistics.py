"""Test a round's metrics of pseudo-labels against numbers by hand and labels made outside the methods."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from semisfl import seeds
from semisfl.data.positions import draw_batches
from semisfl.fleet.base import ClientResult, Features, FullRound
from semisfl.methods import full_model, statistics
from semisfl.methods.fedmatch.method import sum_parameters
from semisfl.metrics import MethodMetrics
from semisfl.settings.catalog import METHODS
from tests import toy

FULL_MODEL = ("semifl", "fedmatch", "fedswitch")
"""Those whose clients keep labels from a confidence that is set; (FL)²'s find their own."""
STATE = {"model": {"w": torch.zeros(1)}}


def features(clients: tuple[int, ...], truth: list[int] | None) -> Features:
    rows = torch.zeros(2 * len(clients), 4)
    return Features(rows, rows, clients, None if truth is None else torch.tensor(truth))


def as_lists(sums: dict[str, Tensor]) -> dict[str, Any]:
    return {name: value.tolist() for name, value in sums.items()}


# --- split rounds ------------------------------------------------------------------------------------


def test_a_split_round_by_hand() -> None:
    labels, confident = torch.tensor([0, 1, 2, 2]), torch.tensor([True, True, False, True])
    sums = statistics.of_step(features((4, 7), [0, 2, 2, -1]), (4, 7), labels, confident, 3)
    rates = statistics.of_split_round({**as_lists(sums), "loss_semi": 6.0}, (4, 7), steps=3)
    assert rates["mask_rate"] == pytest.approx(1 / 4)
    assert rates["impurity"] == pytest.approx(1 / 2)  # one of two confident rows of known label
    assert rates["coverage_by_class"] == [1.0, None, 0.5]
    assert rates["coverage_by_client"] == {"4": 1.0, "7": 0.5}
    assert (rates["contributing"], rates["loss_semi"]) == (2, 2.0)


def test_a_client_that_missed_a_step_did_not_contribute() -> None:
    labels, confident = torch.tensor([0, 1, 1, 1]), torch.tensor([True, False, True, True])
    both = statistics.of_step(features((7, 9), None), (4, 7, 9), labels, confident, 3)
    alone = statistics.of_step(features((7,), None), (4, 7, 9), labels[:2], confident[:2], 3)
    assert alone["client_images"].tolist() == [0, 2, 0]
    assert alone["client_kept"].tolist() == [0, 1, 0]
    sums = {name: both[name] + alone[name] for name in both}
    rates = statistics.of_split_round(as_lists(sums), (4, 7, 9), steps=2)
    assert rates["coverage_by_client"] == {"4": None, "7": 0.5, "9": 1.0}
    assert (rates["contributing"], rates["mask_rate"]) == (1, pytest.approx(1 / 3))


def test_without_true_labels_there_is_no_impurity() -> None:
    labels, confident = torch.tensor([0, 1]), torch.tensor([True, False])
    for truth in (None, [-1, -1]):
        sums = statistics.of_step(features((7,), truth), (7,), labels, confident, 3)
        rates = statistics.of_split_round(as_lists(sums), (7,), steps=1)
        assert rates["mask_rate"] == 0.5
        assert "impurity" not in rates and "coverage_by_class" not in rates


def test_many_images_are_counted_exactly() -> None:
    """More than a bf16 number can tell apart, under the arithmetic that models use on a GPU."""
    truth = torch.arange(3000) % 3
    with torch.autocast("cpu", torch.bfloat16):
        counts = statistics.table(torch.zeros(3000).long(), truth >= 0, truth, 3)
    assert counts.tolist() == [[0, 1000, 1000, 1000], [0, 1000, 1000, 1000], [0, 0, 1000, 1000]]


# --- full-model rounds ---------------------------------------------------------------------------------


def numbers(loss: float, part: float, counts: list[list[float]]) -> dict[str, float]:
    return {"loss": loss, "loss_consistency": part, **statistics.as_numbers(counts)}


def test_a_full_model_round_by_hand() -> None:
    # Two classes: images, kept, wrong; the first column is of unknown class.
    first = numbers(2.0, 1.5, [[2, 4, 2], [1, 1, 0], [0, 1, 0]])
    second = numbers(1.0, 0.5, [[0, 0, 4], [0, 0, 3], [0, 0, 1]])
    results = [
        ClientResult(3, STATE, first),
        ClientResult(5, {}, {}),
        ClientResult(8, STATE, second),
    ]
    row = MethodMetrics(**full_model.report(results))
    assert row == MethodMetrics(
        contributing=2,
        loss_semi=1.5,
        loss_consistency=1.0,
        mask_rate=1 - (2 / 8 + 3 / 4) / 2,
        impurity=2 / 4,
        coverage_by_class=[1 / 4, 3 / 6],
        coverage_by_client={"3": 0.25, "8": 0.75},
    )


@pytest.mark.parametrize("method", FULL_MODEL)
def test_pseudo_labels_are_counted_as_they_are(method: str) -> None:
    """One step: the labels follow from what was sent, and are made here from that alone."""
    threshold = 0.313  # some of these hardly trained models' labels are above it, some below
    settings = ["clients.steps=1", "clients.active=3", f"{method}.confidence_threshold={threshold}"]
    experiment = toy.assemble(method, *settings)
    rounds = toy.watched(experiment.fleet)
    row = experiment.method.round(0)
    assert row.labelled_by_teacher in (None, 1.0)
    (plan,) = (one.plan for one in rounds)
    data, shards = toy.dataset(), toy.partition(toy.dataset()).clients
    coverage, kept_truth, every_truth, wrong = {}, [], [], 0
    for client in plan.active:
        confidence, labels, positions = labelled(method, experiment, plan, client)
        truth, kept = data.labels[shards[client][positions]], confidence >= threshold
        coverage[str(client)] = float(kept.float().mean())
        kept_truth += truth[kept].tolist()
        every_truth += truth.tolist()
        wrong += int((labels != truth)[kept].sum())
    assert 0 < len(kept_truth) < len(every_truth), "nothing to tell apart"
    assert row.coverage_by_client == pytest.approx(coverage)
    assert row.mask_rate == pytest.approx(1 - np.mean(list(coverage.values())))
    assert row.impurity == pytest.approx(wrong / len(kept_truth))
    assert row.coverage_by_class == pytest.approx(
        [kept_truth.count(label) / every_truth.count(label) for label in range(toy.CLASSES)]
    )


def labelled(
    method: str, experiment: Any, plan: FullRound, client: int
) -> tuple[Tensor, Tensor, np.ndarray]:
    """Confidence and pseudo-label of the images a client labels, and which of its images they are."""
    config, model = (
        experiment.config,
        copy.deepcopy(experiment.method.setup.model.whole()),
    )
    count = len(toy.partition(toy.dataset()).clients[client])
    rng = seeds.generator(config.seed, "batches", 0, client)
    drawn = draw_batches(rng, count, 1, config.clients.batch)
    if method == "semifl":
        positions, view, purpose = np.arange(count)[:, None], "weak", "predict-weak"
        model.load_state_dict(plan.send["model"])
    elif method == "fedswitch":
        positions, view, purpose = drawn, "weak", "weak"
        # To a model that knows so little everyone looks IID: the teacher labels.
        model.load_state_dict(plan.on_request["teacher"])
    else:
        positions, view, purpose = drawn, "plain", "plain"
        sigma = copy.deepcopy(model)
        sigma.load_state_dict(plan.send["sigma"])
        model.load_state_dict({**plan.send["psi"], **sum_parameters(sigma, plan.send["psi"])})
    images = toy.views(config, view, purpose, positions, 0, client).flatten(0, 1)
    with torch.no_grad():
        confidence, labels = model.eval()(images).softmax(1).max(1)
    return confidence, labels, positions.flatten()


@pytest.mark.parametrize("method", FULL_MODEL)
def test_a_client_without_true_labels_says_nothing_by_class(method: str) -> None:
    experiment = toy.assemble(method, f"{method}.confidence_threshold=0")
    experiment.fleet.block.labels.fill_(-1)
    rounds = toy.watched(experiment.fleet)
    row = experiment.method.round(0)
    (results,) = (one.results for one in rounds)
    assert row.mask_rate == 0 and row.impurity is None and row.coverage_by_class is None
    assert not [name for result in results for name in result.numbers if "/" in name]


@pytest.mark.parametrize(
    "method", [name for name in METHODS if name not in ("supervised", "probe", "fl2")]
)
def test_all_labels_are_kept_with_a_threshold_of_zero(method: str) -> None:
    section = {"fedswitch-sl": "fedswitch"}.get(method, method)
    row = toy.assemble(
        method, f"{section}.confidence_threshold=0", "clients.active=3"
    ).method.round(0)
    assert row.mask_rate == 0 and row.contributing == 3
    assert row.coverage_by_client == {"0": 1.0, "1": 1.0, "2": 1.0}
    assert row.coverage_by_class == [1.0] * toy.CLASSES
    assert row.impurity is not None and 0 < row.impurity < 1


@pytest.mark.parametrize(
    "method", ["semisfl", "semifl", "fedmatch", "fedswitch", "fedswitch-sl", "fl2"]
)
def test_the_reported_parts_add_up_to_the_loss(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semisfl.methods.fedmatch.method.REFRESH", 1)
    section = {"fedswitch-sl": "fedswitch"}.get(method, method)
    parts = toy.assemble(method, f"{section}.confidence_threshold=0.2").method
    rows = [parts.round(index) for index in range(3)]
    for row in rows:
        assert row.loss_semi is not None and row.loss_consistency is not None
        rest = row.loss_semi - row.loss_consistency
        if method.startswith("fedswitch"):
            assert rest == pytest.approx(0, abs=1e-6)
        elif method == "semisfl":
            assert rest == pytest.approx(row.loss_clustering, rel=1e-5) and rest > 0.1
        elif method == "semifl":
            assert rest > 0.1
        elif method == "fl2":
            assert rest > 1e-6
    if method == "fedmatch":  # in its third round at the latest somebody has helpers
        assert rows[-1].loss_semi - rows[-1].loss_consistency > 0
