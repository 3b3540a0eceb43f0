"""What features say about a client's images without showing them: their classes, and who is among them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class ClassMix:
    accuracy: float
    """Of the class guessed for each image."""
    chance: float
    """Of always guessing the public images' largest class."""
    distance: float
    """Total variation distance between the mix guessed and the true one, mean over clients; 0: found."""
    distance_chance: float
    """Of the public images' mix, which needs no features."""


def guess_classes(
    public: Tensor,
    labels: Tensor,
    clients: Sequence[Tensor],
    truth: Sequence[Tensor],
    classes: int,
    generator: torch.Generator,
    epochs: int = 20,
) -> ClassMix:
    """A linear probe on the attacker's own labelled features, asked about each client's."""
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
    usual = torch.bincount(labels, minlength=classes) / len(labels)
    hits = always = images = 0
    far, far_usual = [], []
    for features, true in zip(clients, truth, strict=True):
        with torch.no_grad():
            guessed = probe((features - centre) / spread).argmax(1)
        hits += int((guessed == true).sum())
        always += int((true == usual.argmax()).sum())
        images += len(true)
        mix = torch.bincount(true, minlength=classes) / len(true)
        far.append(_apart(torch.bincount(guessed, minlength=classes) / len(true), mix))
        far_usual.append(_apart(usual, mix))
    return ClassMix(
        hits / images, always / images, sum(far) / len(far), sum(far_usual) / len(far_usual)
    )


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().sum()) / 2


def membership_auc(observed: Tensor, members: Tensor, others: Tensor) -> float:
    """The chance that a member lies nearer to something ``observed`` than a non-member does; 0.5: none.

    ``members`` and ``others`` are features that the attacker computes of images it has in hand.
    """
    near = torch.cdist(members, observed).amin(1)
    far = torch.cdist(others, observed).amin(1)
    wins = (near[:, None] < far[None]).float() + 0.5 * (near[:, None] == far[None]).float()
    return float(wins.mean())
