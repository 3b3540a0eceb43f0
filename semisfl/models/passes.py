"""Pass several batches through one model together, or one batch with other weights than the model's.

Layers that treat each image by itself take all batches at once; BatchNorm and what follows takes them in turn.
"""

from collections.abc import Mapping, Sequence
from itertools import takewhile

import torch
from torch import Tensor, nn
from torch.func import functional_call

from semisfl.models.layers import Dropout, Layers, Residual
from semisfl.models.stack import ROW_BY_ROW

BY_ITSELF = {
    *(*ROW_BY_ROW, nn.Conv2d, nn.Linear, nn.GroupNorm, nn.LayerNorm),
    *(nn.Sequential, Layers, Residual),
}


def passes(model: nn.Module, batches: Sequence[Tensor], training: Sequence[bool]) -> list[Tensor]:
    """Return ``model`` of each batch [n, ...], in train mode where ``training`` says so.

    Weights that take all batches together are read once and get one gradient. The results are those of one call per
    batch, up to the order of sums.
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


def call_with(model: nn.Module, weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
    """Return ``model`` of ``images`` with other ``weights``; the model keeps its own.

    They are named as in ``named_parameters`` and ``named_buffers``; those that are left out are the model's. Layers
    that share one have the same new one. `functional_call` would not give its own back to a layer that is used twice.
    """
    own = (*model.named_parameters(), *model.named_buffers())
    new = {id(tensor): weights[name] for name, tensor in own if name in weights}
    by_layer = {
        f"{path}.{name}" if path else name: new[id(tensor)]
        for path, layer in model.named_modules()
        for name, tensor in (*layer._parameters.items(), *layer._buffers.items())
        if id(tensor) in new
    }
    return functional_call(model, by_layer, (images,), tie_weights=False)
