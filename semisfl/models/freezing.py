"""A bottom whose weights never change: its parameters become buffers.

Optimisers then have nothing to step in it, moving averages of equal values stay as they are, and a state dict has the
names it always had.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch import Tensor, autocast, nn, no_grad

from semisfl.models.layers import Layers, batchnorms, named_layers


class FrozenLayers(Layers):
    """Layers without parameters that always compute as in eval mode: BatchNorm uses its stored statistics."""

    def train(self, mode: bool = True) -> "FrozenLayers":
        """Stay in eval mode, whatever the model around this one is told."""
        return super().train(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of images in the dtype of ``x``; they are computed in float32 and have no gradient."""
        with no_grad(), autocast(x.device.type, enabled=False):
            return super().forward(x.float()).to(x.dtype)


def freeze(bottom: nn.Module) -> FrozenLayers:
    """Return the layers of ``bottom``, which are moved and not copied, as layers that never change.

    Raises ValueError for a BatchNorm that stores no statistics: what it returns depends on the whole batch.
    """
    if any(layer.running_mean is None for layer in batchnorms(bottom)):
        raise ValueError(
            "clients.bottom = 'frozen' needs the statistics that BatchNorm stores, and a layer before the cut has "
            "none; make it with track_running_stats=True, or set model.cut to a layer before it"
        )
    frozen = FrozenLayers(OrderedDict(named_layers(bottom)))
    for layer in frozen.modules():
        for name, parameter in list(layer.named_parameters(recurse=False, remove_duplicate=False)):
            del layer._parameters[name]
            layer.register_buffer(name, parameter.detach())
    return frozen.eval()


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """Return ``sha256:`` and 64 hexadecimal digits of the names, types, shapes and bytes of weights.

    Equal weights have equal digests on every machine and device, in any order of the names.
    """
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return f"sha256:{digest.hexdigest()}"
