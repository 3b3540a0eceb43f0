"""A penalty that a client adds to its own step: how far features still tell images apart as pixels do."""

import torch
from torch import Tensor

TINY = 1e-9
"""Keeps the root's gradient finite where two rows are equal, as a row and itself always are."""


def distance_correlation(images: Tensor, features: Tensor) -> Tensor:
    """Székely, Rizzo and Bakirov (2007), squared: 0 if rows are independent, 1 if equal up to a
    rotation and a scale. Vepakomma et al. (2020) proposed it against leakage in split learning."""
    one, other = _centred(_distances(images)), _centred(_distances(features))
    spread = (one * one).mean() * (other * other).mean()
    return (one * other).mean() / (spread + TINY).sqrt()


def _distances(rows: Tensor) -> Tensor:
    flat = rows.flatten(1)
    squares = (flat * flat).sum(1)
    return (squares[:, None] + squares[None] - 2 * flat @ flat.T).clamp(min=TINY).sqrt()


def _centred(distances: Tensor) -> Tensor:
    return (
        distances
        - distances.mean(0, keepdim=True)
        - distances.mean(1, keepdim=True)
        + distances.mean()
    )


def penalty_gradient(images: Tensor, features: Tensor, clients: int, weight: float) -> Tensor:
    """Of ``weight`` times the penalty, by features; each client's batch is looked at by itself."""
    gradients: list[Tensor] = []
    for pixels, rows in zip(images.chunk(clients), features.chunk(clients), strict=True):
        leaf = rows.detach().float().clone().requires_grad_()
        with torch.enable_grad():
            loss = weight * distance_correlation(pixels.detach().float(), leaf)
        gradients += torch.autograd.grad(loss, leaf)
    return torch.cat(gradients)
