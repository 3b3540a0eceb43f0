"""Compare reconstructions with their originals; images are float [n, C, H, W] in 0..1.

Three measures, because each can be misled alone: structural similarity as people see it, the signal-to-noise
ratio of pixels, and whether a reconstruction is nearer to its original than to any other.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

WINDOW, DEVIATION = 11, 1.5
"""Pixels across the Gaussian window of the structural similarity, and its standard deviation."""


def ssim(one: Tensor, other: Tensor) -> Tensor:
    """Return the structural similarity of every pair (Wang et al. 2004: Gaussian window); 1 is equal."""
    channels = one.shape[1]
    kernel = _window(min(WINDOW, *one.shape[2:])).to(one).expand(channels, 1, -1, -1)

    def blurred(images: Tensor) -> Tensor:
        return F.conv2d(images, kernel, groups=channels)

    mean1, mean2 = blurred(one), blurred(other)
    spread1 = blurred(one * one) - mean1**2
    spread2 = blurred(other * other) - mean2**2
    both = blurred(one * other) - mean1 * mean2
    structure = (2 * both + 0.03**2) / (spread1 + spread2 + 0.03**2)
    light = (2 * mean1 * mean2 + 0.01**2) / (mean1**2 + mean2**2 + 0.01**2)
    return (structure * light).mean((1, 2, 3))


def _window(size: int) -> Tensor:
    places = torch.arange(size) - (size - 1) / 2
    line = torch.exp(-(places**2) / (2 * DEVIATION**2))
    window = line[:, None] * line[None]
    return window / window.sum()


def psnr(one: Tensor, other: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio of every pair, in decibels."""
    return -10 * ((one - other) ** 2).mean((1, 2, 3)).clamp(min=1e-10).log10()


def identified(rebuilt: Tensor, originals: Tensor) -> float:
    """Return the share of reconstructions whose nearest original is their own."""
    nearest = torch.cdist(rebuilt.flatten(1), originals.flatten(1)).argmin(1)
    return float((nearest == torch.arange(len(rebuilt), device=rebuilt.device)).float().mean())


def likeness(rebuilt: Tensor, originals: Tensor) -> dict[str, float]:
    """Return all three comparisons, averaged over the images: ``ssim``, ``psnr`` in decibels, ``identified`` as a share."""
    return {
        "ssim": float(ssim(rebuilt, originals).mean()),
        "psnr": float(psnr(rebuilt, originals).mean()),
        "identified": identified(rebuilt, originals),
    }
