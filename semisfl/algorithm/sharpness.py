"""Sharpness-aware steps (Foret et al., 2021) of a part of a model."""

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F


def cross_entropy(top: nn.Module, features: Tensor, labels: Tensor, radius: float) -> Tensor:
    """Cross-entropy of ``top``; with a ``radius`` at weights w + radius g / |g|, g its gradient at w.

    Its gradient is then that at the moved weights, which is what a step is to descend; the weights
    themselves stay where they are. ``features`` get their gradient through the moved weights too.
    """
    if not radius:
        return F.cross_entropy(top(features).float(), labels)
    names, weights = zip(*top.named_parameters(), strict=True)
    here = F.cross_entropy(top(features.detach()).float(), labels)
    gradients = torch.autograd.grad(here, weights)
    length = torch.stack([part.float().norm() for part in gradients]).norm()
    scale = radius / (length + 1e-12)
    moved = {
        name: weight + (scale * gradient.float()).to(weight.dtype)
        for name, weight, gradient in zip(names, weights, gradients, strict=True)
    }
    return F.cross_entropy(functional_call(top, moved, (features,)).float(), labels)
