"""Adversarial weights nearby, for the sharpness-aware consistency of (FL)² (Kwon et al., 2021)."""

import torch
from torch import Tensor, nn


def adversarial(module: nn.Module, loss: Tensor, radius: float, eta: float) -> dict[str, Tensor]:
    """Return weights at which ``loss`` is about the highest within ``radius``; the module keeps its own.

    w + radius t t g / |t g|, with g the gradient and t = |w| + eta for weights, 1 for biases (ASAM).
    What is computed with them has its gradient with respect to w there. The loss can still be
    differentiated afterwards.
    """
    names, weights = zip(*module.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, weights, retain_graph=True, materialize_grads=True)
    scales: list[Tensor | float] = [
        weight.detach().abs().float() + eta if name.endswith("weight") else 1.0
        for name, weight in zip(names, weights, strict=True)
    ]
    scaled = [gradient.float() * scale for gradient, scale in zip(gradients, scales, strict=True)]
    length = torch.stack([part.norm() for part in scaled]).norm()
    factor = radius / (length + 1e-12)
    return {
        name: weight + (factor * part * scale).to(weight.dtype)
        for name, weight, part, scale in zip(names, weights, scaled, scales, strict=True)
    }
