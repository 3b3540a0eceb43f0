"""Logistic regression on features that are all in memory, by LBFGS."""

import torch
from torch import Tensor
from torch.nn import functional as F


def regression(features: Tensor, labels: Tensor, decay: float, classes: int) -> Tensor:
    """Return the weights [classes, d] of a logistic regression, by LBFGS; the last column is a bias and does not decay."""
    weight = features.new_zeros(classes, features.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=60, line_search_fn="strong_wolfe")

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(features @ weight.T, labels)
        loss = loss + decay / 2 * weight[:, :-1].square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(step)
    return weight.detach()
