"""The paper's losses, as pure functions. They are computed in full precision whatever the models use."""

from typing import NamedTuple

from torch import Tensor

from semisfl.engine import kernels


class References(NamedTuple):
    """Teacher keys that projections are held against."""

    keys: Tensor
    labels: Tensor
    positive: Tensor
    """bool [r]: may be a positive of an anchor with the same label."""
    present: Tensor
    """bool [r]: enters the sums at all."""


def cross_entropy(
    logits: Tensor, labels: Tensor, others: Tensor | None = None, share: Tensor | None = None
) -> Tensor:
    """Return the mean over rows of CE(labels), or of share CE(labels) + (1 - share) CE(others).

    ``logits`` [n, classes], ``labels`` and ``others`` [n], ``share`` [n] in 0..1 (mixup). A scalar tensor.
    """
    if others is None or share is None:
        return kernels.cross_entropy(logits, labels)
    own = kernels.cross_entropy(logits, labels, share)
    return own + kernels.cross_entropy(logits, others, 1 - share)


def consistency(logits: Tensor, labels: Tensor, confident: Tensor) -> Tensor:
    """Return H of Eq. (1): cross-entropy with pseudo-labels, masked, divided by the whole batch.

    ``labels`` [n]: -1 stands for no label and counts 0. ``confident`` [n]: which labels count, bool or weights from
    0 to 1.
    """
    return kernels.cross_entropy(logits, labels, confident)


def contrastive(
    projections: Tensor,
    labels: Tensor,
    references: References,
    temperature: float,
    mask: Tensor | None = None,
) -> Tensor:
    """Return T of Eq. (3) and C of Eq. (5): the mean over all anchors j of

        -1 / max(1, |P(j)|) * sum_{p in P(j)} log( exp(z_j . z_p / k) / sum_{a in R} exp(z_j . z_a / k) )

    where R are the references that are present and P(j) those of them that may be positive and
    carry j's label. An anchor without positives contributes 0 and is still counted.
    ``mask`` [n, r] takes single references away from single anchors.
    """
    return kernels.contrast(projections, labels, *references, temperature, mask)


def pseudo_label(logits: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return labels q-hat [n] and whether their confidence reaches tau, bool [n], from ``logits`` [n, classes]."""
    return most_likely(logits.float().softmax(1), threshold, ">=")


def most_likely(probabilities: Tensor, threshold: float, rule: str) -> tuple[Tensor, Tensor]:
    """Return the most likely classes [n] and whether their probability reaches ``threshold``, bool [n].

    ``rule``: ``>=`` also takes a probability of exactly the threshold, ``>`` does not.
    """
    confidence, labels = probabilities.max(1)
    return labels, confidence >= threshold if rule == ">=" else confidence > threshold
