"""Check the gradients that a server sends: their length.

Long gradients make one image's part of the bottom that goes back as large as the server likes. Honest
ones of the digits reach 0.01 times their features' norm for a row, and 0.001 times for a batch.
"""

import torch
from torch import Tensor

ROW, BATCH = 10.0, 2.5
"""Most that a row's norm, and a batch's, may be of the features' typical norm. Far above
honest ones, also where a clip of 1 makes features short."""


@torch.no_grad()
def gradient_excess(gradients: Tensor, features: Tensor) -> str | None:
    """Return why the gradients of one step are too long for its ``features``, or None.

    Both are as the server knows them, so that a refusal tells it nothing. NaN is too long.
    """
    # A small clip makes features short, and gradients shrink on their way through it.
    typical = max(1.0, float(features.float().pow(2).sum(1).mean().sqrt()))
    rows = gradients.float().norm(dim=1)
    longest, together = float(rows.max()), float(rows.pow(2).mean().sqrt())
    for words, norm, limit in (("a row", longest, ROW), ("a batch", together, BATCH)):
        if not norm <= limit * typical:
            return (
                f"gradients of {words} have norm {norm:.3g}, their features {typical:.3g}; "
                f"at most {limit:g} times as long is accepted"
            )
    return None
