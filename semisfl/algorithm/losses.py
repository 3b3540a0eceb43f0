"""The paper's losses, as pure functions. They are computed in full precision whatever the models use."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from semisfl.engine.kernels import fused


class References(NamedTuple):
    """Teacher keys that projections are held against."""

    keys: Tensor
    labels: Tensor
    positive: Tensor
    """bool [r]: may be a positive of an anchor with the same label."""
    present: Tensor
    """bool [r]: enters the sums at all."""


def consistency(logits: Tensor, labels: Tensor, confident: Tensor) -> Tensor:
    """H of Eq. (1): cross-entropy with pseudo-labels, masked, divided by the whole batch."""
    losses = F.cross_entropy(logits.float(), labels, reduction="none")
    return (losses * confident).mean()


def contrastive(
    projections: Tensor,
    labels: Tensor,
    references: References,
    temperature: float,
    hidden: Tensor | None = None,
) -> Tensor:
    """T of Eq. (3) and C of Eq. (5): the mean over all anchors j of

        -1 / max(1, |P(j)|) * sum_{p in P(j)} log( exp(z_j . z_p / k) / sum_{a in R} exp(z_j . z_a / k) )

    where R are the references that are present and P(j) those of them that may be positive and
    carry j's label. An anchor without positives contributes 0 and is still counted.
    ``hidden`` [n, r] takes single references away from single anchors.
    """
    if projections.is_cuda and hidden is None and fused() is not None:
        loss: Tensor = fused().contrast(projections, labels, references, temperature)
        return loss
    with torch.autocast(projections.device.type, enabled=False):
        similarity = projections.float() @ references.keys.float().T / temperature
    absent = ~references.present.unsqueeze(0)
    if hidden is not None:
        absent = absent | hidden
    # A large finite number, not -inf: an anchor whose references are all absent must not give NaN.
    similarity = similarity.masked_fill(absent, -1e9)
    log_share = similarity - similarity.logsumexp(dim=1, keepdim=True)
    positives = (
        (labels.unsqueeze(1) == references.labels.unsqueeze(0)) & references.positive & ~absent
    )
    counts = positives.sum(1).clamp(min=1)
    return -((log_share * positives).sum(1) / counts).mean()


def pseudo_label(logits: Tensor, threshold: float, rule: str = ">=") -> tuple[Tensor, Tensor]:
    """Labels q-hat and whether their confidence reaches tau."""
    confidence, labels = logits.float().softmax(1).max(1)
    return labels, confidence >= threshold if rule == ">=" else confidence > threshold
