"""Rebuild images from what a device sends, as a server that follows the protocol can.

From features: the attackers know the bottom and the device's policy. They attack the features as sent: a decoder is
trained (`semisfl.attacks.decoder`), or pixels are optimised.

From a model's update: gradient inversion (Geiping et al. 2020). The attacker knows the model before and after, and
so the mean gradient. Here an update is one step. A real round has many steps with random views and momentum, so it
reveals less.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Transmission = Callable[[Tensor], Tensor]
"""Maps the bottom's features to the received ones; each call draws new noise."""
SMOOTH = 0.02
"""Weight of an image's total variation."""


def optimise_images(
    bottom: Callable[[Tensor], Tensor],
    prepare: Callable[[Tensor], Tensor],
    target: Tensor,
    start: Tensor,
    *,
    steps: int,
) -> Tensor:
    """Return images with features near ``target`` and little total variation.

    The attacker needs no images (Mahendran and Vedaldi 2015). ``prepare`` normalises pixels in 0..1, ``target``
    are received features, ``start`` the images to begin with.
    """
    scale = target.pow(2).mean().clamp(min=1e-12)

    def distance(images: Tensor) -> Tensor:
        return (bottom(prepare(images)) - target).pow(2).mean() / scale

    return optimise_pixels(distance, start, steps)


def optimise_pixels(distance: Callable[[Tensor], Tensor], start: Tensor, steps: int) -> Tensor:
    """Return images with a small ``distance`` and little total variation, found from ``start`` by Adam.

    Pixels are the sigmoid of what is optimised, so they stay in 0..1.
    """
    pixels = torch.logit(start.clamp(0.02, 0.98)).detach().requires_grad_()
    optimizer = torch.optim.Adam([pixels], 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        images = torch.sigmoid(pixels)
        (distance(images) + SMOOTH * total_variation(images)).backward()
        optimizer.step()
    return torch.sigmoid(pixels).detach()


def total_variation(images: Tensor) -> Tensor:
    """Return the mean absolute difference of neighbouring pixels, vertical plus horizontal."""
    down = (images[..., 1:, :] - images[..., :-1, :]).abs().mean()
    across = (images[..., :, 1:] - images[..., :, :-1]).abs().mean()
    return down + across


# --- updates ----------------------------------------------------------------------------------------


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
    """Return images with ``labels`` whose gradient has the direction of the ``target``.

    ``target`` has one tensor per parameter; ``start`` are the pixels in 0..1 to begin with.
    """
    wanted = torch.cat([part.flatten() for part in target])

    def distance(images: Tensor) -> Tensor:
        loss = F.cross_entropy(model(prepare(images)), labels)
        gradient = torch.autograd.grad(loss, list(parameters), create_graph=True)
        return 1 - F.cosine_similarity(torch.cat([g.flatten() for g in gradient]), wanted, dim=0)

    return optimise_pixels(distance, start, steps)
