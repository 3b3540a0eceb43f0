"""Pass several batches through one model: together, as far as its layers treat images independently."""

from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor, nn

from semisfl.models.layers import Dropout, Layers, Residual
from semisfl.models.stacked import ROW_BY_ROW

BY_ITSELF = {
    *(*ROW_BY_ROW, nn.Conv2d, nn.Linear, nn.GroupNorm, nn.LayerNorm),
    *(nn.Sequential, Layers, Residual),
}


def passes(model: nn.Module, batches: Sequence[Tensor], training: Sequence[bool]) -> list[Tensor]:
    """Return ``model`` of each batch, in train mode where ``training`` says so.

    Weights that take all batches together are read once and get one gradient.
    """
    parts = list(model) if type(model) is nn.Sequential else [model]
    # Dropout treats images independently too, but does nothing in eval mode.
    known = BY_ITSELF if len(set(training)) > 1 else {*BY_ITSELF, Dropout}
    shared = list(takewhile(lambda part: {type(layer) for layer in part.modules()} <= known, parts))
    rest, outputs = parts[len(shared) :], list(batches)
    if shared:
        x = torch.cat(outputs)
        for part in shared:
            x = part.train(training[0])(x)
        outputs = list(x.split([len(batch) for batch in batches]))
        if any(getattr(layer, "inplace", False) for part in rest for layer in part.modules()):
            # Autograd forbids in-place writes to one of several views.
            outputs = [output.clone() for output in outputs]
    for number, mode in enumerate(training):
        for part in rest:
            outputs[number] = part.train(mode)(outputs[number])
    return outputs
