"""Compute several copies of a module at once, each with its own weights.

Images are ordered by client; layers without weights treat them as one batch.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semisfl.engine.kernels import stacked_conv, stacked_conv_relu_pool
from semisfl.engine.weights import Module
from semisfl.models.layers import (
    ConvBlock,
    Dropout,
    Layers,
    LinearBlock,
    NormBlock,
    Part,
    Residual,
    conv_arguments,
    parts_of,
    plain_conv,
)

Pass = Callable[[Tensor], Tensor]
Rows = Mapping[int, Tensor]
"""From the identity of a weight of the first copy to the weights of all copies, one row each."""
# Layers whose result for a row depends on that row alone.
ROW_BY_ROW = (
    nn.ReLU,
    nn.GELU,
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.Flatten,
    nn.Unflatten,
    nn.Identity,
)


class NotStacked(Exception):
    """A layer that is not computed for several copies at once."""


def stacked(copies: Sequence[nn.Module], rows: Rows) -> Pass:
    """Return the pass of all ``copies`` of a module; raise `NotStacked` if a layer does not support it."""
    first = copies[0]
    if type(first) in (nn.Sequential, Layers):
        assert isinstance(first, nn.Sequential)
        return _in_turn([_part(part, copies, rows) for part in parts_of(first)])
    return _part(first, copies, rows)


def _in_turn(passes: Sequence[Pass]) -> Pass:
    def run(x: Tensor) -> Tensor:
        for one in passes:
            x = one(x)
        return x

    return run


def _part(part: Part, copies: Sequence[nn.Module], rows: Rows) -> Pass:
    if isinstance(part, ConvBlock):
        return _conv_block(part, rows)
    if isinstance(part, NormBlock):
        if part.norm.momentum is None:
            raise NotStacked(f"{part.norm}, which keeps a cumulative average")
        block = part
        return lambda x: block.stacked(x, lambda weight: rows[id(weight)])
    if isinstance(part, LinearBlock):
        linear = partial(_linear, part.linear, rows)
        return _in_turn([linear, F.relu]) if part.relu else linear
    if type(part) in (nn.Sequential, Layers):
        return stacked(_same(part, copies), rows)
    if type(part) is Residual:
        body, shortcut = (
            stacked([getattr(copy, way) for copy in _same(part, copies)], rows)
            for way in ("body", "shortcut")
        )
        return lambda x: body(x) + shortcut(x)
    if isinstance(part, Dropout):
        return partial(_drop, _same(part, copies))
    if plain_conv(part):
        return partial(_conv, part, rows)
    if type(part) is nn.Linear:
        return partial(_linear, part, rows)
    if type(part) is nn.GroupNorm or type(part) is nn.LayerNorm:
        return partial(_norm, part, rows)
    if type(part) in ROW_BY_ROW:
        return part
    raise NotStacked(str(part).partition("(\n")[0])  # of a block, its name alone


def _same(layer: Module, copies: Sequence[nn.Module]) -> list[Module]:
    """Return the layer of every copy that corresponds to ``layer`` of the first copy."""
    name = next(name for name, one in copies[0].named_modules() if one is layer)
    return [cast(Module, copy.get_submodule(name)) for copy in copies]


def _of(weight: Tensor | None, rows: Rows) -> Tensor | None:
    return None if weight is None else rows[id(weight)]


def _conv(conv: nn.Conv2d, rows: Rows, x: Tensor) -> Tensor:
    out: Tensor = stacked_conv(
        x, rows[id(conv.weight)], _of(conv.bias, rows), *conv_arguments(conv)
    )
    return out


def _conv_block(block: ConvBlock, rows: Rows) -> Pass:
    conv = block.conv
    if conv.stride != (1, 1) or conv.dilation != (1, 1) or conv.groups != 1:
        pool = nn.MaxPool2d(2) if block.pool == 2 else nn.Identity()
        return _in_turn([partial(_conv, conv, rows), pool, F.relu])
    weight, bias = rows[id(conv.weight)], _of(conv.bias, rows)
    return lambda x: stacked_conv_relu_pool(x, weight, bias, conv.padding, block.pool)


def _linear(layer: nn.Linear, rows: Rows, x: Tensor) -> Tensor:
    weight, bias = rows[id(layer.weight)], _of(layer.bias, rows)
    shares, weight = x.unflatten(0, (len(weight), -1)), weight.transpose(1, 2)
    if bias is None:
        return torch.bmm(shares, weight).flatten(0, 1)
    return torch.baddbmm(bias.unsqueeze(1), shares, weight).flatten(0, 1)


def _norm(layer: nn.GroupNorm | nn.LayerNorm, rows: Rows, x: Tensor) -> Tensor:
    """Normalise every image by itself, then scale it by its own copy's weights."""
    if isinstance(layer, nn.GroupNorm):
        x, beside = F.group_norm(x, layer.num_groups, eps=layer.eps), (1,) * (x.dim() - 2)
    else:
        x, beside = F.layer_norm(x, layer.normalized_shape, eps=layer.eps), ()
    for weight, apply in ((layer.weight, torch.mul), (layer.bias, torch.add)):
        if weight is not None:
            own = rows[id(weight)]
            own = own.reshape(len(own), 1, *own.shape[1:], *beside)
            x = apply(x.unflatten(0, (len(own), -1)), own).flatten(0, 1)
    return x


def _drop(layers: Sequence[Dropout], x: Tensor) -> Tensor:
    """Apply dropout; every copy draws from its own generator."""
    first = layers[0]
    if not first.training or first.p == 0:
        return x
    keep = torch.empty_like(x)
    for layer, share in zip(layers, keep.chunk(len(layers)), strict=True):
        share.bernoulli_(1 - layer.p, generator=layer.generator)
    return x * keep.div_(1 - first.p)
