"""Rebuild images from a client's update: gradient inversion (Geiping et al. 2020).

The attacker knows the model before and after, and so the mean gradient. Here an update is one step. A
real round has many steps with random views and momentum, so it reveals less.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semisfl.attacks.inversion import optimised


def gradient_of(
    model: nn.Module, parameters: Sequence[Tensor], images: Tensor, labels: Tensor
) -> list[Tensor]:
    """Return the gradient that one step on ``images`` reveals."""
    loss = F.cross_entropy(model(images), labels)
    return [part.detach() for part in torch.autograd.grad(loss, list(parameters))]


def mean_gradient(gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the mean over clients, which is all that the mean of their models reveals."""
    return [torch.stack(parts).mean(0) for parts in zip(*gradients, strict=True)]


def invert_gradient(
    model: nn.Module,
    parameters: Sequence[Tensor],
    target: Sequence[Tensor],
    labels: Tensor,
    prepare: Callable[[Tensor], Tensor],
    start: Tensor,
    *,
    steps: int,
) -> Tensor:
    """Return images with ``labels`` whose gradient has the direction of the ``target``."""
    wanted = torch.cat([part.flatten() for part in target])

    def distance(images: Tensor) -> Tensor:
        loss = F.cross_entropy(model(prepare(images)), labels)
        gradient = torch.autograd.grad(loss, list(parameters), create_graph=True)
        return 1 - F.cosine_similarity(torch.cat([g.flatten() for g in gradient]), wanted, dim=0)

    return optimised(distance, start, steps)
