"""Check the gradients that a server sends: their length, and whether they look like hijacking.

Long gradients make one image's part of the bottom that goes back as large as the server likes. Honest
ones of the digits reach 0.01 times their features' norm for a row, and 0.001 times for a batch.

Gradients of a classifier pull the features of different images different ways. Those of a server
that wants features to look like its own encoder's (Pasquini et al. 2021) push all of them one way.
Where a client's images are nearly all of one class an honest server's are aligned too, so this is a
sign and no proof; docs/leakage.md says how often it is wrong. A bottom that was planted by the
server needs no gradients and leaves no such sign. Nor does a server that knows this rule: gradients of
features that a ReLU made 0 change nothing, and turn the rows wherever it likes.
"""

from collections import deque

import torch
from torch import Tensor

ROW, BATCH = 10.0, 2.5
"""Most that a row's norm, and a batch's, may be of the features' typical norm. Far above
honest ones, also where a clip of 1 makes features short."""
WINDOW = 20
"""Steps that are judged together."""
LIMIT = 0.8
"""Mean cosine between the gradients of two images, over a window; above it is suspicious."""
FEWEST = 4
"""Rows with a direction that are judged together; those of smaller batches wait for more."""


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


def directions(gradients: Tensor) -> Tensor:
    """Return the rows that have a direction, at unit length.

    Short rows count as long ones do: a server could otherwise hide its gradients beside a few long ones.
    """
    rows = gradients[gradients.norm(dim=1) > 0]
    return rows / rows.norm(dim=1, keepdim=True)


def alignment(gradients: Tensor) -> float | None:
    """Return the mean cosine between rows of two images; None if fewer than four have a direction."""
    units = directions(gradients)
    count = len(units)
    if count < FEWEST:
        return None
    return float((units.sum(0).pow(2).sum() - count) / (count * (count - 1)))


class HijackDetector:
    """Judge the gradients of several steps together."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=WINDOW)
        self._waiting: Tensor | None = None

    @torch.no_grad()
    def look(self, gradients: Tensor) -> str | None:
        """Return why the latest gradients look like hijacking; None if not, or if it is too early."""
        rows = directions(gradients.float())
        # A server could otherwise send one row per step and never be judged.
        rows = rows if self._waiting is None else torch.cat([self._waiting, rows])
        cosine = alignment(rows)
        self._waiting = rows if cosine is None else None
        if cosine is not None:
            self._seen.append(cosine)
        mean = sum(self._seen) / max(1, len(self._seen))
        if len(self._seen) < WINDOW or mean <= LIMIT:
            return None
        return (
            f"gradients look like hijacking: over {WINDOW} steps those of two images have cosine "
            f"{mean:.2f} on average, the limit is {LIMIT:g}"
        )
