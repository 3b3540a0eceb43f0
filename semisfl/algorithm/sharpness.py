"""Adversarial weights nearby, for sharpness-aware steps (Foret et al., 2021; Kwon et al., 2021)."""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from semisfl.algorithm import losses


def adversarial(
    module: nn.Module,
    loss: Tensor,
    radius: float,
    eta: float | None = None,
    retain: bool = False,
) -> dict[str, Tensor]:
    """Weights at which ``loss`` is about the highest within ``radius``; the module's stay as they are.

    w + radius g / |g| with g the gradient; with ``eta``, adaptively to the weights' sizes (ASAM):
    w + radius t t g / |t g|, t = |w| + eta for weights and 1 for biases. What is computed with them
    has its gradient with respect to w there. ``retain``: the loss is still to be differentiated.
    """
    names, weights = zip(*module.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, weights, retain_graph=retain)
    scales: list[Tensor | float] = [
        1.0 if eta is None or not name.endswith("weight") else weight.detach().abs().float() + eta
        for name, weight in zip(names, weights, strict=True)
    ]
    scaled = [gradient.float() * scale for gradient, scale in zip(gradients, scales, strict=True)]
    length = torch.stack([part.norm() for part in scaled]).norm()
    factor = radius / (length + 1e-12)
    return {
        name: weight + (factor * part * scale).to(weight.dtype)
        for name, weight, part, scale in zip(names, weights, scaled, scales, strict=True)
    }


def cross_entropy(top: nn.Module, features: Tensor, labels: Tensor, radius: float) -> Tensor:
    """Cross-entropy of ``top``; with a ``radius`` at the adversarial weights within it.

    Its gradient is then that at those weights, which is what a step is to descend, also for
    ``features``.
    """
    if not radius:
        return losses.cross_entropy(top(features), labels)
    here = losses.cross_entropy(top(features.detach()), labels)
    weights = adversarial(top, here, radius)
    return losses.cross_entropy(functional_call(top, weights, (features,)), labels)
