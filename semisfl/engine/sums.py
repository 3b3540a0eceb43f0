"""A module whose parameters are the sum of two others', of which one is learned.

The three have the same flat layout: the step of the learned part, its regularisers and the new sum in the
precision the layers compute in are one pass over memory (`sgd_step`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from semisfl.engine.weights import CAST_LAYERS, Weights, as_view


class Regularisers(NamedTuple):
    """l2 |learned - fixed|^2 + l1 |learned|_1, as sums over all entries that are added."""

    l2: float
    l1: float


UNREGULARISED = Regularisers(0.0, 0.0)


@torch.no_grad()
def add_up(
    total: nn.Module,
    fixed: nn.Module,
    learned: nn.Module,
    names: Sequence[str],
    dtype: torch.dtype,
) -> None:
    """Make the parameters ``names`` of ``total`` fixed + learned, in ``dtype`` if its layers can be cast.

    Its other parameters become those of ``fixed`` and are not trained, its buffers those of
    ``learned``. An optimiser of ``total`` steps ``learned``, as d total / d learned = 1. After
    loading either part, call ``total.weights.refresh()``.
    """
    layers = [total.get_submodule(name.rpartition(".")[0]) for name in names]
    castable = all(isinstance(layer, CAST_LAYERS) for layer in layers)
    copied = [total.get_parameter(name) for name in names]
    weights = Weights(total, dtype if castable else torch.float32, copied)
    assert weights.work is not None
    weights.base = torch.zeros_like(weights.master[: weights.work.numel()])
    for name, parameter in total.named_parameters():
        mine, other = learned.get_parameter(name), fixed.get_parameter(name)
        if hasattr(parameter, "home") and hasattr(parameter, "master"):
            start, size = parameter.home.start, parameter.home.size
            base = as_view(weights.base[start : start + size], parameter.shape)
            parameter.master.copy_(mine)
            base.copy_(other)
            mine.data, other.data = parameter.master, base
        else:
            parameter.data = other.data
            parameter.requires_grad_(False)
    for layer, its in zip(total.modules(), learned.modules(), strict=True):
        layer._buffers.update(its._buffers)
    weights.refresh()
