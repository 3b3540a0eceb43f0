"""A network that rebuilds images from the features that a server receives (Dosovitskiy and Brox 2016, He et al. 2019).

The attacker knows the bottom and the device's policy. It trains on its own images: their features pass the same
clipping, noise and codec as a device's.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semisfl.models.layers import Residual
from semisfl.models.own import global_seed

BATCH, RATE = 32, 2e-3
"""Images per step, and the largest learning rate: it rises and falls again (Smith and Topin 2018)."""
HIDDEN = 512
"""Units between features without positions and the first picture made of them."""
CHANNELS = 16
"""Channels of a picture of the full size; one of half the size has twice as many. There are 16 to 256."""


def decoder_of(takes: Sequence[int], gives: Sequence[int]) -> nn.Sequential:
    """Return a network from features of one image of shape ``takes`` to images of shape ``gives`` = (C, H, W) in 0..1.

    Features [C, h, w] keep their positions; those without any first become a picture of an eighth of the size.
    Then residual blocks and enlargements by two alternate.
    """
    channels, *size = gives
    has_positions = len(takes) == 3 and takes[1] > 1
    grid = list(takes[1:]) if has_positions else [-(-side // 8) for side in size]
    width = _width(grid, size)
    if has_positions:
        layers = [nn.BatchNorm2d(takes[0]), nn.Conv2d(takes[0], width, 3, padding=1)]
    else:
        layers = [nn.Flatten(), nn.Linear(prod(takes), HIDDEN), nn.ReLU()]
        layers += [nn.Linear(HIDDEN, width * prod(grid)), nn.Unflatten(1, (width, *grid))]
    # Its weights for each position tell the convolutions where they are.
    layers += [nn.LayerNorm([width, *grid]), _residual(width)]
    while 4 * grid[0] < 1.25 * size[0]:
        before, grid = width, [2 * side for side in grid]
        width = _width(grid, size)
        layers += [nn.Conv2d(before, 4 * width, 1), nn.PixelShuffle(2), _residual(width)]
    # The last enlargement makes pixels at once: layers at the full size would take most of the time.
    return nn.Sequential(
        *layers,
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 4 * channels, 3, padding=1),
        nn.PixelShuffle(2),
        nn.Upsample(tuple(size), mode="bilinear"),
        nn.Sigmoid(),
    )


def _width(grid: Sequence[int], size: Sequence[int]) -> int:
    return min(256, max(16, CHANNELS * size[0] // grid[0] // 8 * 8))


def _residual(width: int) -> Residual:
    conv = partial(nn.Conv2d, width, width, 3, padding=1)
    norms = [nn.BatchNorm2d(width) for _ in range(2)]
    return Residual(nn.Sequential(norms[0], nn.ReLU(), conv(), norms[1], nn.ReLU(), conv()))


def train_decoder(
    show: Callable[[int], Tensor],
    receive: Callable[[Tensor], Tensor],
    takes: Sequence[int],
    generator: torch.Generator,
    *,
    epochs: int,
) -> Callable[[Tensor], Tensor]:
    """Train a decoder on the attacker's own images, and return it as a function of received features [n, d].

    Args:
        show: returns the views of the attacker's images in an epoch, uint8 [n, C, H, W].
        receive: returns the features of such views as the server receives them, [n, d]; each call draws new noise.
        takes: the shape of one image's features, whose product is d.
        generator: draws the first weights and the order of images.
        epochs: how often each image is shown.
    """
    views = show(0)
    with global_seed(generator.initial_seed()):
        decoder = decoder_of(takes, views.shape[1:]).to(views.device)
    optimizer = torch.optim.Adam(decoder.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE, epochs=epochs, steps_per_epoch=-(-len(views) // BATCH)
    )

    def decode(rows: Tensor) -> Tensor:
        return torch.cat([decoder(part.unflatten(1, tuple(takes))) for part in rows.split(100)])

    for epoch in range(epochs):
        views = show(epoch) if epoch else views
        order = torch.randperm(len(views), generator=generator).to(views.device)
        for chosen in order.split(BATCH):
            optimizer.zero_grad()
            F.mse_loss(decode(receive(views[chosen])), views[chosen].float() / 255).backward()
            optimizer.step()
            schedule.step()
    decoder.eval()
    return torch.no_grad()(decode)
