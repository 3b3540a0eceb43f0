"""Losses against double loops written from the paper's Eqs. (1), (3) and (5)."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from semisfl import seeds
from semisfl.algorithm.losses import References, consistency, contrastive, most_likely, pseudo_label
from semisfl.models.build import build

KAPPA = 0.2


def softmax(row: np.ndarray) -> np.ndarray:
    shifted = np.exp(row - row.max())
    return shifted / shifted.sum()


def naive_consistency(logits: np.ndarray, labels: np.ndarray, flags: np.ndarray) -> float:
    total = 0.0
    for j in range(len(logits)):
        if flags[j]:
            total += -math.log(softmax(logits[j])[labels[j]])
    return total / len(logits)


def naive_contrastive(
    z: np.ndarray,
    labels: np.ndarray,
    references: References,
    kappa: float,
    hidden: np.ndarray | None = None,
) -> float:
    keys, key_labels, positive, present = (part.double().numpy() for part in references)
    total = 0.0
    for j in range(len(z)):
        seen = [
            a for a in range(len(keys)) if present[a] and not (hidden is not None and hidden[j, a])
        ]
        denominator = sum(math.exp(z[j] @ keys[a] / kappa) for a in seen)
        positives = [p for p in seen if positive[p] and key_labels[p] == labels[j]]
        inner = 0.0
        for p in positives:
            inner += math.log(math.exp(z[j] @ keys[p] / kappa) / denominator)
        total += -inner / max(1, len(positives))
    return total / len(z)


def unit(rng: np.random.Generator, rows: int, width: int = 8) -> Tensor:
    return F.normalize(torch.from_numpy(rng.normal(size=(rows, width))), dim=1)


def scene(
    number: int, anchors: int = 7, others: int = 11
) -> tuple[Tensor, Tensor, References, Tensor]:
    """Anchors with their own keys first, then others; masks drawn at random."""
    rng = seeds.generator(0, "scene", number)
    labels = torch.from_numpy(rng.integers(0, 3, anchors))
    references = References(
        unit(rng, anchors + others),
        torch.cat([labels, torch.from_numpy(rng.integers(-1, 3, others))]),
        torch.from_numpy(rng.random(anchors + others) < 0.6),
        torch.from_numpy(rng.random(anchors + others) < 0.8),
    )
    hidden = torch.from_numpy(rng.random((anchors, anchors + others)) < 0.2)
    return unit(rng, anchors), labels, references, hidden


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("hide", [False, True])
def test_contrastive_is_the_double_loop(number: int, hide: bool) -> None:
    z, labels, references, hidden = scene(number)
    mask = hidden if hide else None
    expected = naive_contrastive(
        z.numpy(), labels.numpy(), references, KAPPA, hidden.numpy() if hide else None
    )
    assert float(contrastive(z, labels, references, KAPPA, mask)) == pytest.approx(
        expected, abs=2e-6
    )


def test_an_anchors_own_key_counts_unless_it_is_masked() -> None:
    rng = seeds.generator(0, "own key")
    z, keys = unit(rng, 4), unit(rng, 4)
    labels = torch.tensor([0, 1, 2, 3])
    yes = torch.ones(4, dtype=torch.bool)
    references = References(keys, labels, yes, yes)
    with_own = naive_contrastive(z.numpy(), labels.numpy(), references, KAPPA)
    assert with_own > 0
    assert float(contrastive(z, labels, references, KAPPA)) == pytest.approx(with_own, abs=2e-6)
    # All labels differ: without its own key, no anchor has a positive.
    assert float(contrastive(z, labels, references, KAPPA, torch.eye(4, dtype=torch.bool))) == 0


def test_anchor_without_positives_gives_zero_but_is_counted() -> None:
    rng = seeds.generator(0, "counted")
    z, keys = unit(rng, 2), unit(rng, 3)
    yes = torch.ones(3, dtype=torch.bool)
    references = References(keys, torch.tensor([0, 0, 5]), yes, yes)
    both = contrastive(z, torch.tensor([0, 9]), references, KAPPA)
    alone = contrastive(z[:1], torch.tensor([0]), references, KAPPA)
    assert float(both) == pytest.approx(float(alone) / 2, rel=1e-6)


def test_nothing_present_is_zero_and_has_a_finite_gradient() -> None:
    z = unit(seeds.generator(0, "nothing"), 3).requires_grad_()
    no = torch.zeros(2, dtype=torch.bool)
    references = References(unit(seeds.generator(1, "nothing"), 2), torch.tensor([0, 1]), ~no, no)
    loss = contrastive(z, torch.tensor([0, 1, 1]), references, KAPPA)
    loss.backward()
    assert float(loss.detach()) == 0
    assert z.grad is not None and bool(z.grad.isfinite().all()) and float(z.grad.abs().max()) == 0


def test_absent_references_change_nothing() -> None:
    z, labels, references, _ = scene(3)
    kept = References(*(part[references.present] for part in references))
    assert float(contrastive(z, labels, references, KAPPA)) == pytest.approx(
        float(contrastive(z, labels, kept, KAPPA)), abs=1e-6
    )
    everyone = references._replace(present=torch.ones_like(references.present))
    assert float(contrastive(z, labels, everyone, KAPPA)) != pytest.approx(
        float(contrastive(z, labels, references, KAPPA)), abs=1e-3
    )


@pytest.mark.parametrize("number", range(3))
def test_contrastive_gradient_is_the_double_loops(number: int) -> None:
    """Finite differences of the double loop in float64."""
    z, labels, references, hidden = scene(number, anchors=4, others=5)
    leaf = z.clone().requires_grad_()
    contrastive(leaf, labels, references, KAPPA, hidden).backward()
    assert leaf.grad is not None
    numeric = np.zeros(z.shape)
    step = 1e-6
    for place in np.ndindex(*z.shape):
        values = []
        for sign in (1, -1):
            moved = z.numpy().copy()
            moved[place] += sign * step
            values.append(
                naive_contrastive(moved, labels.numpy(), references, KAPPA, hidden.numpy())
            )
        numeric[place] = (values[0] - values[1]) / (2 * step)
    np.testing.assert_allclose(leaf.grad.numpy(), numeric, atol=2e-6)


@pytest.mark.parametrize("kept", ["some", "none", "all"])
def test_consistency_divides_by_all_rows(kept: str) -> None:
    rng = seeds.generator(0, "consistency")
    logits = torch.from_numpy(rng.normal(size=(9, 4)) * 3).requires_grad_()
    labels = torch.from_numpy(rng.integers(0, 4, 9))
    flags = {
        "some": torch.arange(9) % 3 == 0,
        "none": torch.zeros(9) > 0,
        "all": torch.ones(9) > 0,
    }[kept]
    loss = consistency(logits, labels, flags)
    expected = naive_consistency(logits.detach().numpy(), labels.numpy(), flags.numpy())
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-6)
    loss.backward()
    assert logits.grad is not None
    shares = np.stack([softmax(row) for row in logits.detach().numpy()])
    shares[np.arange(9), labels.numpy()] -= 1
    np.testing.assert_allclose(logits.grad.numpy(), shares * flags.numpy()[:, None] / 9, atol=1e-6)


def test_pseudo_label_at_the_threshold() -> None:
    # softmax of (log 3, 0) is exactly 0.75 for its first entry.
    logits = torch.tensor([[math.log(3.0), 0.0], [0.0, 5.0], [0.1, 0.0]])
    confidence = float(logits[0].softmax(0)[0])
    labels, flags = pseudo_label(logits, confidence)
    assert labels.tolist() == [0, 1, 0]
    assert flags.tolist() == [True, True, False]
    assert most_likely(logits.softmax(1), confidence, ">")[1].tolist() == [False, True, False]


def test_the_clustering_loss_trains_bottom_and_projector_but_not_the_top() -> None:
    model = build("cnn", (1, 16, 16), 3, seed=1)
    rng = seeds.generator(0, "reach")
    images = torch.from_numpy(rng.normal(size=(6, 1, 16, 16))).float()
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    with torch.no_grad():
        keys = model.project(model.bottom(images + 0.1))
    yes = torch.ones(6, dtype=torch.bool)
    features = model.bottom(images)
    model.top(features)
    contrastive(
        model.project(features), labels, References(keys, labels, yes, yes), KAPPA
    ).backward()
    assert all(parameter.grad is None for parameter in model.top.parameters())
    for part in (model.bottom, model.projector):
        assert all(float(p.grad.abs().max()) > 0 for p in part.parameters() if p.grad is not None)
        assert all(p.grad is not None for p in part.parameters())
