"""Test the limits on one client's features by hand, and that nothing changes without them."""

import pytest
import torch

from semisfl.fleet.base import Features, HeldBack
from semisfl.methods.influence import NO_LABEL, Influence
from semisfl.runs.loop import run_rounds
from tests import toy

ACTIVE = (4, 7, 9)


def influence(*settings: str) -> Influence:
    experiment = toy.assemble("semisfl", "clients.active=3", *settings)
    return experiment.method.influence  # type: ignore[attr-defined, no-any-return]


def limited(*settings: str) -> Influence:
    return influence("robust.features=limited", *settings)


def features(student: torch.Tensor, clients: tuple[int, ...] = ACTIVE) -> Features:
    return Features(student.requires_grad_(), student.detach() * 2, clients)


def logits_of(labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(labels, toy.CLASSES).float()


def test_without_limits_vectors_are_unchanged() -> None:
    limit = influence()
    inputs = features(torch.randn(6, 5))
    labels, confident = torch.zeros(6, dtype=torch.long), torch.ones(6, dtype=torch.bool)
    assert limit.limit_features(inputs, ACTIVE) is inputs
    result = limit.usable_labels(inputs, ACTIVE, torch.randn(6, 4), labels, confident)
    assert result[0] is labels and result[1] is confident
    assert limit.as_positives(inputs, labels, confident) is confident


def test_a_step_of_two_clients_has_no_limits() -> None:
    """Of two neither can be the judge of the other; of three one is found out."""
    for clients in (ACTIVE, ACTIVE[1:]):
        limit, rows = limited("robust.class_share=0.5"), torch.ones(12 * len(clients), 4)
        rows[-12:] *= 50
        inputs = features(rows, clients)
        labels = torch.tensor([0, 1] * (len(rows) // 2))
        seen, confident = labels.clone(), torch.ones(len(rows), dtype=torch.bool)
        seen[-12:] = 1 - labels[-12:]
        limit.start_round()
        short = limit.limit_features(inputs, ACTIVE)
        used = limit.usable_labels(inputs, ACTIVE, logits_of(seen), labels, confident)
        positives = limit.as_positives(inputs, torch.zeros_like(labels), confident)
        if len(clients) == 2:
            assert (short, *used, positives) == (inputs, labels, confident, confident)
        else:
            assert short.student.max() == 2 and not used[1][-12:].any() and used[1][:-12].all()
            assert positives.sum() == 36 and short is not inputs


def test_long_vectors_are_shortened_to_the_limit_and_others_unchanged() -> None:
    limit, rows = limited(), torch.ones(6, 4)
    rows[4:] *= torch.tensor([[50.0], [1.5]])
    result = limit.limit_features(features(rows.clone()), ACTIVE)
    # Each client's mean length is 2, 2 and 51.5: the median is 2, twice that is taken.
    assert result.student.detach().norm(dim=1).tolist() == pytest.approx([2, 2, 2, 2, 4, 3])
    assert result.teacher.norm(dim=1).tolist() == pytest.approx([4, 4, 4, 4, 8, 6])
    assert torch.equal(result.student.detach()[[0, 1, 2, 3, 5]], rows[[0, 1, 2, 3, 5]])
    assert result.student.is_leaf and result.student.requires_grad


def test_a_client_that_swaps_classes_is_excluded_and_named() -> None:
    limit, held = limited(), HeldBack()
    inputs = features(torch.ones(24, 4))
    labels = torch.tensor([0, 1, 2, 3] * 4 + [1, 2, 3, 0] * 2)
    # Three of four, all, none.
    seen = torch.tensor([0, 1, 2, 0] * 2 + [0, 1, 2, 3] * 4)
    confident = torch.ones(24, dtype=torch.bool)
    limit.start_round()
    used, kept = limit.usable_labels(inputs, ACTIVE, logits_of(seen), labels, confident)
    assert kept.tolist() == [True] * 16 + [False] * 8
    assert used.tolist() == [*labels[:16].tolist(), *[NO_LABEL] * 8]
    limit.report(ACTIVE, held)
    message = held.take()
    assert message is not None and list(message) == ["9"]
    assert "unused in 1 of 1 steps: student and teacher ones agree on 0% of classes" in message["9"]


def test_agreement_is_that_of_the_round_so_far_and_of_confident_labels() -> None:
    limit = limited()
    inputs, none = features(torch.ones(6, 4)), torch.zeros(6, dtype=torch.bool)
    labels, all_ = torch.tensor([0, 1, 0, 1, 0, 1]), torch.ones(6, dtype=torch.bool)
    right, wrong = logits_of(labels), logits_of(torch.tensor([0, 1, 0, 1, 1, 0]))
    limit.start_round()
    # Nobody is confident: nothing is known of anybody.
    assert not limit.usable_labels(inputs, ACTIVE, wrong, labels, none)[1].any()
    assert limit.usable_labels(inputs, ACTIVE, right, labels, all_)[1].all()
    # Of n labels two are right: half is as much as the others have, less two deviations of chance.
    for labelled in range(4, 30, 2):
        ignored = 2 / labelled < 0.5 - 2 * 0.5 / labelled**0.5
        result = limit.usable_labels(inputs, ACTIVE, wrong, labels, all_)[1].tolist()
        assert result == [True] * 4 + [not ignored] * 2, labelled
    assert ignored
    limit.start_round()
    assert limit.usable_labels(inputs, ACTIVE, right, labels, all_)[1].all(), (
        "a new round, nothing of the round before counts"
    )


def test_a_few_labels_that_differ_are_no_reason_to_ignore_a_client() -> None:
    """Four labels may differ by chance; five of a client that agrees on none are enough."""
    limit = limited()
    labels = torch.tensor([0, 1] * 3)
    wrong = logits_of(torch.tensor([0, 1, 0, 1, 1, 0]))
    inputs, all_ = features(torch.ones(6, 4)), torch.ones(6, dtype=torch.bool)
    limit.start_round()
    used = [limit.usable_labels(inputs, ACTIVE, wrong, labels, all_)[1][4:].all() for _ in range(3)]
    assert used == [True, True, False]


def test_a_client_that_left_is_not_mistaken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semisfl.methods.influence.FEWEST", 2)
    limit, held = limited(), HeldBack()
    inputs = features(torch.ones(32, 4), clients=(4, 9))
    labels = torch.tensor([0, 1] * 16)
    limit.start_round()
    seen = logits_of(torch.tensor([0, 1] * 8 + [1, 0] * 8))
    limit.usable_labels(inputs, ACTIVE, seen, labels, torch.ones(32, dtype=torch.bool))
    limit.report(ACTIVE, held)
    assert list(held.take() or {}) == ["9"]


def test_a_class_has_keys_of_several_clients() -> None:
    limit = limited("robust.class_share=0.5")
    inputs = features(torch.ones(12, 4))
    labels = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2, 0, 2, 2, 2])
    result = limit.as_positives(inputs, labels, torch.ones(12, dtype=torch.bool))
    # Of class 0 the first client may have as many as the others together (2), of class 2 the third one
    # 1; who shows a class alone keeps one.
    assert result.tolist() == [1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 0, 0]
    assert limited().as_positives(inputs, labels, result) is result, "1: no limit"


@pytest.mark.parametrize("method", ["semisfl", "fedswitch-sl"])
def test_limits_that_nobody_reaches_change_nothing(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    thresholds = [f"{m}.confidence_threshold=0.3" for m in ("semisfl", "fedswitch")]
    common = ["rounds=2", "clients.active=3", *thresholds]
    limits = {"as_sent": (2.0, 0.5), "limited": (1e6, 0.0), "limited tightly": (1.0, 0.5)}
    experiments, rows = [], []
    for features, (longest, agreement) in limits.items():
        monkeypatch.setattr("semisfl.methods.influence.LONGEST", longest)
        monkeypatch.setattr("semisfl.methods.influence.LEAST_AGREEMENT", agreement)
        chosen = f"robust.features={features.split()[0]}"
        experiments.append(toy.assemble(method, *common, chosen))
        rows.append(run_rounds(experiments[-1]).rounds[-1])
    plain, wide, _ = experiments
    assert rows[0]["loss_semi"] == rows[1]["loss_semi"] != rows[2]["loss_semi"]
    toy.assert_same(*(next(iter(e.method.tested().values())).state_dict() for e in (plain, wide)))
