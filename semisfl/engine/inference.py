"""A model's answers to many images, a batch at a time."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

BATCH = 500


def outputs(
    model: nn.Module, images: Tensor, prepare: Callable[[Tensor], Tensor]
) -> Iterator[Tensor]:
    """Logits of ``images``, one batch after the other; ``prepare`` makes a batch the model's input.

    The model is in eval mode meanwhile and afterwards as it was.
    """
    mode = model.training
    model.eval()
    try:
        for part in images.split(BATCH):
            with torch.no_grad():
                yield model(prepare(part))
    finally:
        model.train(mode)
