"""Rebuild images from features, as a server that follows the protocol can.

Both attackers know the bottom and the device's policy. They attack the features as sent: a decoder is
trained on features that passed the same clipping, noise and codec.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Sent = Callable[[Tensor], Tensor]
"""Maps the bottom's features to the received ones; each call draws new noise."""
HIDDEN = 512
"""Units of the decoder's hidden layer."""
SMOOTH = 0.02
"""Weight of an image's total variation."""


def train_decoder(
    features: Tensor,
    images: Tensor,
    sent: Sent,
    generator: torch.Generator,
    *,
    epochs: int,
) -> Callable[[Tensor], Tensor]:
    """Train a two-layer network on the attacker's own images, and return it as a function.

    The function maps received features to images: Dosovitskiy and Brox (2016), He et al. (2019).
    """
    first = sent(features)
    centre, spread = first.mean(), first.std().clamp(min=1e-6)
    decoder = nn.Sequential(
        nn.Linear(features.shape[1], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, images[0].numel())
    ).to(features.device)
    _draw_weights(decoder, generator)
    optimizer = torch.optim.Adam(decoder.parameters(), 1e-3)

    def decode(rows: Tensor) -> Tensor:
        return torch.sigmoid(decoder((rows - centre) / spread)).view(-1, *images.shape[1:])

    for _ in range(epochs):
        rows = sent(features)
        order = torch.randperm(len(rows), generator=generator).to(rows.device)
        for chosen in order.split(64):
            optimizer.zero_grad()
            F.mse_loss(decode(rows[chosen]), images[chosen]).backward()
            optimizer.step()
    return torch.no_grad()(decode)


def _draw_weights(module: nn.Module, generator: torch.Generator) -> None:
    """Draw weights as PyTorch does for linear layers, but from ``generator``."""
    for parameter in module.parameters():
        limit = parameter.shape[-1] ** -0.5
        drawn = torch.rand(parameter.shape, generator=generator) * 2 - 1
        parameter.data.copy_(drawn * limit)


def optimise_images(
    bottom: Callable[[Tensor], Tensor],
    prepare: Callable[[Tensor], Tensor],
    target: Tensor,
    start: Tensor,
    *,
    steps: int,
) -> Tensor:
    """Return images with features near ``target`` and little total variation.

    The attacker needs no images (Mahendran and Vedaldi 2015). ``prepare`` normalises pixels in 0..1.
    """
    scale = target.pow(2).mean().clamp(min=1e-12)

    def distance(images: Tensor) -> Tensor:
        return (bottom(prepare(images)) - target).pow(2).mean() / scale

    return optimised(distance, start, steps)


def optimised(distance: Callable[[Tensor], Tensor], start: Tensor, steps: int) -> Tensor:
    """Return images with a small ``distance`` and little total variation, found from ``start``."""
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
