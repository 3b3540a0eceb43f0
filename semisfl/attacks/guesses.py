"""Attacks that infer the classes of a client's images, or whether an image is among them.

Neither rebuilds an image. Both need only features that the server receives, and images of the attacker.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class ClassMix:
    """The quality of guesses of clients' classes, beside guesses without features."""

    accuracy: float
    """Accuracy of the class guessed for each image."""
    chance: float
    """Accuracy of always guessing the largest class of the public images."""


def guess_classes(
    public: Tensor,
    labels: Tensor,
    clients: Sequence[Tensor],
    truth: Sequence[Tensor],
    classes: int,
    generator: torch.Generator,
    epochs: int = 20,
) -> ClassMix:
    """Train a linear probe on the attacker's labelled features, and return how well it reads clients' classes.

    ``public`` [n, width] are the attacker's features and ``labels`` their classes; ``clients`` are the received
    features of each client and ``truth`` their true classes.
    """
    centre, spread = public.mean(0), public.std().clamp(min=1e-6)
    probe = nn.Linear(public.shape[1], classes).to(public.device)
    nn.init.zeros_(probe.weight)
    nn.init.zeros_(probe.bias)
    optimizer = torch.optim.Adam(probe.parameters(), 2e-3, weight_decay=1e-3)
    rows = (public - centre) / spread
    for _ in range(epochs):
        for chosen in torch.randperm(len(rows), generator=generator).to(rows.device).split(64):
            optimizer.zero_grad()
            F.cross_entropy(probe(rows[chosen]), labels[chosen]).backward()
            optimizer.step()
    largest = torch.bincount(labels, minlength=classes).argmax()
    hits = always = images = 0
    for features, true in zip(clients, truth, strict=True):
        with torch.no_grad():
            guessed = probe((features - centre) / spread).argmax(1)
        hits += int((guessed == true).sum())
        always += int((true == largest).sum())
        images += len(true)
    return ClassMix(hits / images, always / images)


def membership_auc(observed: Tensor, members: Tensor, others: Tensor) -> float:
    """Return the probability that a member is nearer to an ``observed`` feature than a non-member is.

    0.5 means that nothing leaks. ``members`` and ``others`` are features that the attacker computes from
    images it has.
    """
    near = torch.cdist(members, observed).amin(1)
    far = torch.cdist(others, observed).amin(1)
    wins = (near[:, None] < far[None]).float() + 0.5 * (near[:, None] == far[None]).float()
    return float(wins.mean())
