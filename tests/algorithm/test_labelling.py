"""Pseudo-labels that adapt, against cases computed by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from semisfl.algorithm.labelling import Labelling, Labels
from semisfl.algorithm.losses import consistency, pseudo_label
from semisfl.settings.pseudo_labels import LabelSettings

ACTIVE = (0, 2)
# Two rows of each of two clients, as probabilities.
ROWS = [[0.6, 0.3, 0.1], [0.2, 0.7, 0.1], [0.1, 0.1, 0.8], [0.3, 0.3, 0.4]]
SURE = [[0.9, 0.05, 0.05], [0.9, 0.05, 0.05], [0.05, 0.05, 0.9], [0.05, 0.9, 0.05]]
EVEN = torch.ones(3)


def labelling(tau: float = 0.9, prior: Tensor = EVEN, **settings: Any) -> Labelling:
    chosen = LabelSettings(**{"warmup": 0, "least": 0.0, **settings})
    made = Labelling(chosen, tau, ">=", prior, clients=3, active=2)
    made.start_round(0, ACTIVE)
    return made


def label(by: Labelling, rows: list[list[float]], clients: tuple[int, ...] = ACTIVE) -> Labels:
    return by.label(torch.tensor(rows).log(), clients, ACTIVE)


def loss(by: Labelling, student: Tensor, given: Labels) -> float:
    return float(by.loss(student, given, given.labels, given.confident))


STUDENT = torch.tensor([[0.5, -1.0, 0.0], [1.0, 0.2, 0.3], [0.0, 2.0, 1.0], [0.1, 0.2, 0.3]])


def test_without_settings_it_is_the_papers_rule() -> None:
    plain = labelling(0.6)
    given = label(plain, ROWS)
    labels, confident = pseudo_label(torch.tensor(ROWS).log(), 0.6)
    assert torch.equal(given.labels, labels) and torch.equal(given.confident, confident)
    assert loss(plain, STUDENT, given) == float(consistency(STUDENT, labels, confident))
    assert plain.state_dict() == {}


# --- thresholds -----------------------------------------------------------------------------------

THRESHOLDS = {
    # The mean confidence, (0.6 + 0.7 + 0.8 + 0.4) / 4.
    "global": [0.625] * 4,
    # The mean prediction is (0.3, 0.35, 0.35): class 0 needs 6/7 of what the others need.
    "class": [0.625 * 6 / 7, 0.625, 0.625, 0.625],
    "client": [0.65, 0.65, 0.6, 0.6],
    "client_class": [0.65 * 6 / 7, 0.65, 0.6, 0.6],
}


@pytest.mark.parametrize("kind", THRESHOLDS)
def test_a_moving_threshold_is_the_mean_confidence(kind: str) -> None:
    given = label(labelling(threshold=kind), ROWS)
    assert given.threshold is not None
    assert given.threshold.tolist() == pytest.approx(THRESHOLDS[kind])
    confidences = (0.6, 0.7, 0.8, 0.4)
    reached = [have >= need for have, need in zip(confidences, THRESHOLDS[kind], strict=True)]
    assert given.confident.tolist() == reached and True in reached and False in reached


def test_a_threshold_moves_by_its_decay_after_its_first_step() -> None:
    by = labelling(threshold="client", client_decay=0.75, decay=0.9)
    label(by, ROWS)
    # Client 2 alone answers: weight max(1/2, 1 - 0.75) of its second step, then 1/3, then 1/4.
    one = [[0.05, 0.05, 0.9], [0.15, 0.15, 0.7]]
    expected = 0.6
    for weight in (1 / 2, 1 / 3, 1 / 4, 1 / 4):
        given = label(by, one, (2,))
        expected += weight * (0.8 - expected)
        assert given.threshold is not None
        assert given.threshold.tolist() == pytest.approx([expected] * 2)
    # Nobody else's moved.
    assert by.state_dict()["client_confidence"].tolist() == pytest.approx([0.65, 1 / 3, expected])


def test_a_threshold_by_how_much_of_a_class_reaches_tau() -> None:
    """Of client 0 all reach 0.55, one of each of two classes; of client 2 one of two does, of class 2."""
    given = label(labelling(0.55, threshold="client_share"), ROWS)
    assert given.threshold is not None and given.labels.tolist() == [0, 1, 2, 2]
    # Client 0: shares 0.5, 0.5, 0, so b = 1. Client 2: 0.5 of class 2 against 0.5 that does not: 1.
    assert given.threshold.tolist() == pytest.approx([0.55] * 4)
    by = labelling(0.65, threshold="client_share")
    given = label(by, ROWS)
    # Client 0: class 0 never, so b = 0; class 1 half against half. Client 2 as before.
    assert given.threshold is not None
    assert given.threshold.tolist() == pytest.approx([0.0, 0.65, 0.65, 0.65])
    given = label(by, [[0.1, 0.2, 0.7], [0.2, 0.2, 0.6], *ROWS[2:]])
    # Its second step weighs a half: shares 0, 1/4 and 1/4, and 1/2 that do not; b = 1/2, b / (2 - b) = 1/3.
    assert given.threshold is not None
    assert given.threshold.tolist()[:2] == pytest.approx([0.65 / 3] * 2)


def test_a_label_needs_a_low_energy_too() -> None:
    logits = torch.tensor([[5.0, 0.0, 0.0], [1.0, -4.0, -4.0], [0.0, 6.0, 1.0], [-2.0, -9.0, -9.0]])
    by = labelling(0.9, energy=-1.005)
    given = by.label(logits, ACTIVE, ACTIVE)
    # All are confident; energies about -5.01, -1.01, -6.01 and 2.0.
    assert bool((logits.softmax(1).amax(1) > 0.9).all())
    assert given.confident.tolist() == [True, True, True, False]
    by = labelling(0.9, energy=-1.005, warmup=1)
    assert by.label(logits, ACTIVE, ACTIVE).confident.tolist() == [True] * 4


def test_a_threshold_stays_between_least_and_tau() -> None:
    assert label(labelling(0.61, threshold="global"), ROWS).threshold.tolist() == pytest.approx(  # type: ignore[union-attr]
        [0.61] * 4
    )
    high = label(labelling(0.9, threshold="global", least=0.7), ROWS)
    assert high.threshold.tolist() == pytest.approx([0.7] * 4)  # type: ignore[union-attr]


def test_nothing_adapts_before_its_warm_up_is_over() -> None:
    by = labelling(
        0.75, threshold="client_class", align="client", below="soft", adjust=1.0, warmup=2
    )
    for round_index in range(3):
        by.start_round(round_index, ACTIVE)
        given = label(by, ROWS)
        plain = label(labelling(0.75), ROWS)
        warm = round_index == 2
        assert torch.equal(given.confident, plain.confident) is not warm
        assert (loss(by, STUDENT, given) == pytest.approx(loss(labelling(), STUDENT, plain))) is (
            not warm
        )


# --- class mixes ----------------------------------------------------------------------------------


def test_predictions_are_corrected_for_what_a_client_holds() -> None:
    """q' ~ q pi_i / pi_s, with pi_i the moving mean of q' and a share of pi_s in it."""
    prior = torch.tensor([0.5, 0.25, 0.25])
    by = labelling(prior=prior, align="client", smoothing=0.2, client_decay=0.5)
    assert torch.allclose(label(by, SURE).probabilities, torch.tensor(SURE))  # type: ignore[arg-type]
    second = label(by, ROWS).probabilities
    assert second is not None
    for client, rows in ((0, slice(0, 2)), (1, slice(2, 4))):
        seen = torch.tensor(SURE)[rows].mean(0)
        mix = 0.8 * seen + 0.2 * prior
        expected = torch.tensor(ROWS)[rows] * mix / prior
        expected = expected / expected.sum(1, keepdim=True)
        assert torch.allclose(second[rows], expected, atol=1e-6), client
        held = by.state_dict()["client_mix"][ACTIVE[client]]
        assert torch.allclose(held, 0.5 * seen + 0.5 * expected.mean(0), atol=1e-6)
    # Client 0 holds class 0 by far the most: an image between two classes becomes one of it.
    doubtful = label(by, [[0.45, 0.5, 0.05], [0.9, 0.05, 0.05], *ROWS[2:]])
    assert doubtful.labels[0] == 0


def test_predictions_are_aligned_with_the_labelled_images() -> None:
    """q' ~ q pi_s / the mean prediction of all clients."""
    prior = torch.tensor([0.5, 0.25, 0.25])
    by = labelling(prior=prior, align="global")
    label(by, ROWS)
    mean = torch.tensor(ROWS).mean(0)
    expected = torch.tensor(SURE) * prior / mean
    expected = expected / expected.sum(1, keepdim=True)
    assert torch.allclose(label(by, SURE).probabilities, expected, atol=1e-6)  # type: ignore[arg-type]


def test_logits_are_adjusted_by_the_log_of_a_clients_mix() -> None:
    by = labelling(0.5, adjust=2.0, smoothing=0.1)
    given = label(by, SURE)
    total = 0.0
    for row in range(4):
        rows = torch.tensor(SURE)[:2] if row < 2 else torch.tensor(SURE)[2:]
        mix = 0.9 * rows.mean(0) + 0.1 / 3
        adjusted = STUDENT[row] + 2 * torch.log(mix * 3)
        total += float(-torch.log_softmax(adjusted, 0)[int(given.labels[row])])
    assert loss(by, STUDENT, given) == pytest.approx(total / 4, rel=1e-5)


# --- images under the threshold -------------------------------------------------------------------


def test_images_below_are_weighted_by_a_gaussian() -> None:
    by = labelling(0.75, below="gaussian", below_weight=0.5)
    given = label(by, ROWS)
    variance = float(torch.tensor([0.6, 0.7, 0.8, 0.4]).var(correction=0))
    each = -torch.log_softmax(STUDENT, 1)[torch.arange(4), given.labels]
    total = float(each[2])
    for row, confidence in ((0, 0.6), (1, 0.7), (3, 0.4)):
        total += 0.5 * math.exp(-((0.75 - confidence) ** 2) / (2 * variance)) * float(each[row])
    assert loss(by, STUDENT, given) == pytest.approx(total / 4, rel=1e-5)


def test_confidences_that_are_all_alike_have_a_weight() -> None:
    """Their variance is zero, and so is how far they lie under the threshold that is their mean."""
    by = labelling(0.9, below="gaussian", threshold="global")
    given = label(by, [[0.6, 0.3, 0.1]] * 4)
    assert math.isfinite(loss(by, STUDENT, given))
    alone = Labelling(LabelSettings(below="gaussian", warmup=0), 0.9, ">=", EVEN, 3, 1)
    alone.start_round(0, (1,))
    one = alone.label(torch.tensor([[0.6, 0.3, 0.1]]).log(), (1,), (1,))
    assert math.isfinite(loss(alone, STUDENT[:1], one))


def test_images_below_teach_all_their_probabilities() -> None:
    by = labelling(0.75, below="soft", below_weight=0.5)
    given = label(by, ROWS)
    scores = torch.log_softmax(STUDENT, 1)
    total = -float(scores[2, 2])
    for row in (0, 1, 3):
        total -= 0.5 * float((torch.tensor(ROWS[row]) * scores[row]).sum())
    assert loss(by, STUDENT, given) == pytest.approx(total / 4, rel=1e-5)


@pytest.mark.parametrize("below", ["gaussian", "soft"])
def test_a_label_that_was_taken_away_teaches_nothing(below: str) -> None:
    by = labelling(0.75, below=below)
    given = label(by, ROWS)
    taken = given.labels.clone()
    taken[:] = -1
    assert float(by.loss(STUDENT, given, taken, torch.zeros(4, dtype=torch.bool))) == 0
