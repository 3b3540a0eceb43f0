"""Images from what a round of training leaves in a model: gradient inversion (Geiping et al. 2020).

The attacker knows the model before and after, so the mean gradient; here of a single step, which is
more than it gets of a real round of many steps, whose views and momentum it would have to undo too.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semisfl.attacks.inversion import total_variation


def gradient_of(
    model: nn.Module, parameters: Sequence[Tensor], images: Tensor, labels: Tensor
) -> list[Tensor]:
    """What one step on ``images`` tells whoever holds the model before and after it."""
    loss = F.cross_entropy(model(images), labels)
    return [part.detach() for part in torch.autograd.grad(loss, list(parameters))]


def mean_gradient(gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Of several clients: all that is left of them in the mean of their models."""
    return [torch.stack(parts).mean(0) for parts in zip(*gradients, strict=True)]


def invert_gradient(
    model: nn.Module,
    parameters: Sequence[Tensor],
    seen: Sequence[Tensor],
    labels: Tensor,
    prepare: Callable[[Tensor], Tensor],
    start: Tensor,
    *,
    steps: int = 150,
    smooth: float = 0.02,
) -> Tensor:
    """Images of known ``labels`` whose gradient points where the ``seen`` one does."""
    pixels = torch.logit(start.clamp(0.02, 0.98)).detach().requires_grad_()
    optimizer = torch.optim.Adam([pixels], 0.1)
    wanted = torch.cat([part.flatten() for part in seen])
    for _ in range(steps):
        optimizer.zero_grad()
        images = torch.sigmoid(pixels)
        loss = F.cross_entropy(model(prepare(images)), labels)
        made = torch.autograd.grad(loss, list(parameters), create_graph=True)
        apart = 1 - F.cosine_similarity(torch.cat([g.flatten() for g in made]), wanted, dim=0)
        (apart + smooth * total_variation(images)).backward()
        optimizer.step()
    return torch.sigmoid(pixels).detach()
