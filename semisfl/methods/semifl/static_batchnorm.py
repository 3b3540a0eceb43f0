"""Static BatchNorm (SemiFL): statistics recomputed over data instead of tracked while training.

While training every batch is normalised by its own statistics. Before a model is tested or sent, its
statistics are computed anew over plain images of several holders of data, who send only these.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from semisfl.models.layers import batchnorms

SBN_BATCH = 250


def statistics_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of ``model``'s BatchNorm layers, by their name in its state."""
    layers = {id(layer) for layer in batchnorms(model)}
    return {
        f"{path}.{name}": buffer
        for path, layer in model.named_modules()
        if id(layer) in layers
        for name, buffer in layer.named_buffers(recurse=False)
    }


def is_statistic(name: str) -> bool:
    """Return whether the tensor of this name in a model's state is one of `statistics_of` it."""
    return name.endswith(("running_mean", "running_var", "num_batches_tracked"))


def _of_several(batches: Iterable[Tensor]) -> Iterator[Tensor]:
    """Return the same images, none alone: the deviation of a single value does not exist.

    A batch of one image joins the one before; a holder's only image is shown twice.
    """
    waiting: Tensor | None = None
    for images in batches:
        if waiting is None:
            waiting = images
        elif len(images) == 1 or len(waiting) == 1:
            waiting = torch.cat([waiting, images])
        else:
            yield waiting
            waiting = images
    if waiting is not None:
        yield torch.cat([waiting, waiting]) if len(waiting) == 1 else waiting


@torch.no_grad()
def recompute_statistics(model: nn.Module, batches: Iterable[Tensor]) -> int:
    """Give ``model`` the cumulative averages of its BatchNorm inputs; return the count of ``batches``.

    Every layer normalises by the current batch meanwhile, so the averages of one holder of data do
    not depend on those of another. They combine with the numbers of batches as weights.
    """
    layers, mode = batchnorms(model), model.training
    momenta = [layer.momentum for layer in layers]
    model.eval()
    for layer in layers:
        layer.train()
        layer.reset_running_stats()
        layer.momentum = None  # PyTorch's word for a cumulative average
    count = 0
    for images in _of_several(batches):
        half = images.dtype == torch.bfloat16
        with torch.autocast(images.device.type, dtype=torch.bfloat16, enabled=half):
            model(images)
        count += 1
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
    model.train(mode)
    return count


def combine_statistics(parts: Sequence[tuple[Mapping[str, Tensor], float]]) -> dict[str, Tensor]:
    """Return the mean of several holders' statistics, weighted by their batches; counters add up.

    ``parts``: (statistics, number of batches) of each holder.
    """
    total = sum(weight for _, weight in parts)
    first = parts[0][0]
    return {
        name: sum(
            (part[name] * (weight / total) for part, weight in parts), torch.zeros_like(first[name])
        )
        if first[name].is_floating_point()
        else torch.stack([part[name] for part, _ in parts]).sum(0)
        for name in first
    }
