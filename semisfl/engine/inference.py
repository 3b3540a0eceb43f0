"""Compute a model's outputs for many images, in batches."""

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
    """Return the logits of ``images`` [n, channels, height, width], batch by batch.

    ``prepare`` turns a batch into the model's input. ``before_each`` runs before every batch and may raise to
    stop. ``most``: images of a batch on a CPU. The model runs in eval mode, and its mode is restored.
    """
    mode = model.training
    model.eval()
    try:
        for part in images.split(_batch(model, images)) if len(images) else ():
            before_each()
            with torch.no_grad():
                yield model(prepare(part))
    finally:
        model.train(mode)


def _batch(model: nn.Module, images: Tensor) -> int:
    """Return the batch size: smaller for large images on a CPU, as a stop is noticed between batches only."""
    if next(model.parameters(), images).device.type != "cpu":
        return BATCH
    return max(16, min(BATCH, BATCH * 3 * 32 * 32 // max(1, images[:1].numel())))
