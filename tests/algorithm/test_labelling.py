"""Pseudo-labels that are corrected for what clients hold, against cases computed by hand."""

import pytest
import torch
from torch import Tensor

from semisfl.algorithm.labelling import Labelling
from semisfl.algorithm.losses import pseudo_label

ACTIVE = (0, 2)
MEMBERS = {client: f"camera-{client}" for client in range(3)}
# Two rows of each of two clients, as probabilities.
ROWS = [[0.6, 0.3, 0.1], [0.2, 0.7, 0.1], [0.1, 0.1, 0.8], [0.3, 0.3, 0.4]]
SURE = [[0.9, 0.05, 0.05], [0.9, 0.05, 0.05], [0.05, 0.05, 0.9], [0.05, 0.9, 0.05]]
PRIOR = torch.tensor([0.5, 0.25, 0.25])


@pytest.fixture(autouse=True)
def no_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semisfl.algorithm.labelling.WARMUP_ROUNDS", 0)


def labelling(
    tau: float = 0.9, rule: str = ">=", prior: Tensor = PRIOR, align: str = "none"
) -> Labelling:
    made = Labelling(align, tau, rule, prior, clients=3, active=2)
    made.start_round(0, ACTIVE, MEMBERS)
    return made


def label(
    by: Labelling, rows: list[list[float]], clients: tuple[int, ...] = ACTIVE
) -> tuple[Tensor, Tensor]:
    return by.label(torch.tensor(rows).log(), clients, ACTIVE)


def normalised(rows: Tensor) -> Tensor:
    return rows / rows.sum(1, keepdim=True)


def corrected_for(client: int, mix: Tensor, usual: Tensor, rows: list[list[float]]) -> Tensor:
    """q' of a client's two rows, with a tenth of the usual mix in its own."""
    place = 2 * ACTIVE.index(client)
    return normalised(torch.tensor(rows)[place : place + 2] * (0.9 * mix + 0.1 * usual) / usual)


def test_the_default_labelling_is_the_papers_rule() -> None:
    plain = labelling(0.6)
    labels, confident = label(plain, ROWS)
    expected, reached = pseudo_label(torch.tensor(ROWS).log(), 0.6)
    assert torch.equal(labels, expected) and torch.equal(confident, reached)
    assert plain.state_dict() == {}


def test_predictions_are_corrected_by_the_clients_class_mix() -> None:
    """q' ~ q pi_i / pi; pi_i is the moving mean of q', pi the mean of both clients seen: not of the third."""
    by = labelling(0.7, align="client")
    first, _ = label(by, SURE)
    assert first.tolist() == [0, 0, 2, 1]
    labels, confident = label(by, ROWS)
    for client, rows in ((0, slice(0, 2)), (2, slice(2, 4))):
        seen = torch.tensor(SURE)[rows].mean(0)
        expected = corrected_for(client, seen, torch.tensor(SURE).mean(0), ROWS)
        assert torch.equal(labels[rows], expected.argmax(1)), client
        assert torch.equal(confident[rows], expected.amax(1) >= 0.7), client
        # Its second step weighs a half.
        mix = by.state_dict()["client_mix"][client]
        assert torch.allclose(mix, (seen + expected.mean(0)) / 2, atol=1e-6)
    # Client 0 holds class 0 by far the most: an image between two classes becomes one of it.
    doubtful, _ = label(by, [[0.45, 0.5, 0.05], [0.9, 0.05, 0.05], *ROWS[2:]])
    assert doubtful[0] == 0


def test_the_mean_of_a_client_moves_only_by_its_own_steps() -> None:
    by = labelling(align="client")
    label(by, SURE)
    before = by.state_dict()["client_mix"].clone()
    label(by, SURE[2:], (2,))
    after, steps = by.state_dict()["client_mix"], by.state_dict()["client_steps"]
    assert torch.equal(after[:2], before[:2]) and not torch.equal(after[2], before[2])
    assert steps.tolist() == [1, 0, 2]


def test_after_fifty_steps_a_mean_moves_by_its_decay() -> None:
    by = labelling(align="client")
    by.load_state_dict({**by.state_dict(), "client_steps": torch.full((3,), 1000.0)})
    mixes = by.state_dict()["client_mix"].copy_(normalised(torch.eye(3) + 0.5)).clone()
    mix = mixes[0]
    label(by, SURE)
    mean = corrected_for(0, mix, mixes.mean(0), SURE).mean(0)
    assert torch.allclose(by.state_dict()["client_mix"][0], mix + 0.02 * (mean - mix), atol=1e-6)


def test_a_class_that_is_seen_too_often_in_every_client_does_not_grow() -> None:
    """Soft predictions that lean to class 0 everywhere are left as they are, step after step."""
    by = labelling(0.4, prior=torch.full((3,), 1 / 3), align="client")
    soft = [[0.4, 0.32, 0.28], [0.34, 0.33, 0.33]] * 2
    for _ in range(300):
        labels, confident = label(by, soft)
    assert labels.tolist() == [0, 0, 0, 0] and confident.tolist() == [True, False, True, False]
    expected = torch.tensor(soft).mean(0)
    for client in ACTIVE:
        assert torch.allclose(by.state_dict()["client_mix"][client], expected, atol=1e-4)


def test_predictions_are_aligned_with_the_labelled_images() -> None:
    """q' ~ q pi_s / the mean prediction of all clients."""
    by = labelling(0.6, align="global")
    label(by, ROWS)
    expected = normalised(torch.tensor(ROWS) * PRIOR / torch.tensor(ROWS).mean(0))
    labels, confident = label(by, ROWS)
    assert torch.equal(labels, expected.argmax(1))
    assert torch.equal(confident, expected.amax(1) >= 0.6)
    assert labels.tolist() != torch.tensor(ROWS).argmax(1).tolist()


@pytest.mark.parametrize("align", ["client", "global"])
def test_a_class_that_is_never_predicted_at_all_leaves_the_others_as_they_are(align: str) -> None:
    """A softmax of logits far apart is exactly 0 for the other classes, and so are their means."""
    by = labelling(align=align)
    far = torch.tensor([[200.0, 200.0, 0.0]] * 3 + [[0.0, 200.0, -10.0]])
    for _ in range(3):
        labels, confident = by.label(far, ACTIVE, ACTIVE)
        assert labels[3] == 1 and confident[3]
    means = [value for name, value in by.state_dict().items() if name != "names"]
    assert all(mean.isfinite().all() for mean in means)


@pytest.mark.parametrize(("rule", "reached"), [(">=", True), (">", False)])
def test_the_setting_decides_if_a_confidence_equal_to_tau_counts(rule: str, reached: bool) -> None:
    even = torch.full((4,), 0.25)
    by = labelling(0.25, rule, even, align="client")
    assert by.label(torch.zeros(2, 4), ACTIVE, ACTIVE)[1].tolist() == [reached] * 2


@pytest.mark.parametrize("align", ["client", "global"])
def test_nothing_is_corrected_before_the_warm_up_is_over(
    align: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semisfl.algorithm.labelling.WARMUP_ROUNDS", 2)
    by, plain = labelling(0.6, align=align), labelling(0.6)
    for round_index in range(3):
        by.start_round(round_index, ACTIVE, MEMBERS)
        same = all(
            torch.equal(*pair) for pair in zip(label(by, ROWS), label(plain, ROWS), strict=True)
        )
        assert same is (round_index < 2), round_index


@pytest.mark.parametrize("members", [MEMBERS | {0: "another"}, {2: "camera-2"}])
def test_what_a_client_seemed_to_hold_is_forgotten_with_it(members: dict[int, str]) -> None:
    """Its place may be another one's now; and one that was shut out has no part in the usual mix."""
    by = labelling(align="client")
    label(by, SURE)
    resumed = Labelling("client", 0.9, ">=", PRIOR, clients=3, active=2)
    resumed.load_state_dict(by.state_dict())
    kept = by.state_dict()["client_mix"][2].clone()
    for one in (by, resumed):
        one.start_round(1, ACTIVE, members)
        means = one.state_dict()
        assert means["client_steps"].tolist() == [0, 0, 1]
        assert torch.equal(means["client_mix"][0], PRIOR)
        assert torch.equal(means["client_mix"][2], kept) and not torch.equal(kept, PRIOR)
