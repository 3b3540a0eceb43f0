"""Logistic regression on features that are all in memory, by L-BFGS; and the few columns that such features need.

The optimum with weight decay is a combination of the rows. So a fit to n rows needs no more than n columns, whatever
the length of a feature (`span`). These columns are uncorrelated, and once they are scaled by their curvature a few
steps find the optimum.
"""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

ROUGHLY = 3e-2
"""The tolerance of the weights by which the columns are scaled for the rest of a fit."""
FLAT = 1e-8
"""Decay of the bias: none that counts, and no division by 0."""
MEMORY = 10
"""Steps that L-BFGS remembers."""


def span(features: Tensor) -> Tensor:
    """Return an orthonormal basis [d, r] of the rows of ``features`` [n, d], r <= n, in which columns are uncorrelated."""
    if len(features) < features.shape[1]:
        basis = torch.linalg.qr(features.T).Q
        return basis @ span(features @ basis)
    return torch.linalg.eigh(features.T @ features).eigenvectors


def regression(
    features: Tensor,
    labels: Tensor,
    decay: float,
    classes: int,
    start: Tensor | None = None,
    tolerance: float = 1e-5,
) -> Tensor:
    """Return the weights [classes, d] of a logistic regression; the last column is a bias and does not decay.

    Args:
        features: [n, d]; the last column is the bias's and constant.
        labels: the class of each row.
        decay: the weight decay; the loss has half of it times the squared weights.
        classes: how many classes there are.
        start: weights to begin with; None: zeros.
        tolerance: the norm of the gradient to end at, as a share of the weights' norm.
    """
    decays = F.pad(features.new_full((features.shape[1] - 1,), decay), (0, 1), value=FLAT)
    one_hot, squares = F.one_hot(labels, classes), features.square()
    weight = features.new_zeros(classes, features.shape[1]) if start is None else start

    def loss_and_gradient(point: Tensor) -> tuple[float, Tensor]:
        scaled = point * scale
        logits = features @ scaled.T
        errors = (logits.softmax(1) - one_hot) / len(labels)
        loss = F.cross_entropy(logits, labels) + (decays * scaled.square()).sum() / 2
        return float(loss), (errors.T @ features + decays * scaled) * scale

    with torch.no_grad():
        for end in (ROUGHLY, tolerance):
            # The second derivative by each weight, here.
            likely = (features @ weight.T).softmax(1)
            curvature = (likely * (1 - likely)).T @ squares / len(labels)
            scale = (curvature + decays).rsqrt()
            weight = _minimum(loss_and_gradient, weight / scale, end) * scale
    return weight


def _minimum(
    function: Callable[[Tensor], tuple[float, Tensor]], point: Tensor, tolerance: float
) -> Tensor:
    """Return where a convex ``function``, which returns its value and gradient, is smallest."""
    (value, gradient), pairs = function(point), deque[tuple[Tensor, Tensor]](maxlen=MEMORY)
    while float(gradient.norm()) > tolerance * max(1.0, float(point.norm())):
        step = -_solve(gradient, list(pairs), None)
        enough = 1e-4 * float((gradient * step).sum())
        while (there := function(point + step))[0] > value + enough:
            step, enough = step / 2, enough / 2
            if float(step.norm()) < FLAT * float(point.norm()):  # rounding errors decide
                return point
        pairs.append((step, there[1] - gradient))
        point, (value, gradient) = point + step, there
    return point


def _solve(vector: Tensor, pairs: list[tuple[Tensor, Tensor]], size: Tensor | None) -> Tensor:
    """Return the inverse Hessian times ``vector``, as ``pairs`` of steps and changes of the gradient tell it (BFGS).

    ``size``: the inverse Hessian where no pair tells it; None: as the newest pair has it.
    """
    if not pairs:
        return vector if size is None else vector * size
    step, change = pairs.pop()
    along = (step * change).sum()
    share = (step * vector).sum() / along
    size = along / change.square().sum() if size is None else size
    inner = _solve(vector - share * change, pairs, size)
    return inner + step * (share - (change * inner).sum() / along)
