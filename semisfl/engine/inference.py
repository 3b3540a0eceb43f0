"""A model's answers to many images, a batch at a time."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

BATCH = 500
"""Images of 32 x 32 pixels at a time."""


def outputs(
    model: nn.Module,
    images: Tensor,
    prepare: Callable[[Tensor], Tensor],
    before_each: Callable[[], object] = lambda: None,
) -> Iterator[Tensor]:
    """Logits of ``images``, one batch after the other; ``prepare`` makes a batch the model's input.

    The model is in eval mode meanwhile and afterwards as it was. ``before_each`` batch may raise.
    """
    mode = model.training
    model.eval()
    try:
        for part in images.split(_batch(model, images)):
            before_each()
            with torch.no_grad():
                yield model(prepare(part))
    finally:
        model.train(mode)


def _batch(model: nn.Module, images: Tensor) -> int:
    """On a CPU fewer large images at a time: whoever is asked to stop looks between two batches."""
    if next(model.parameters()).device.type != "cpu":
        return BATCH
    return max(16, min(BATCH, BATCH * 3 * 32 * 32 // max(1, images[:1].numel())))
