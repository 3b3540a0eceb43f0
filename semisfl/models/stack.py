"""Several clients' copies of one module, with stacked weights: one operation updates all of them.

`Stack` holds the copies. On a GPU their layers are also computed together: `pass_of_copies` makes one pass of
all copies, in which a convolution or a matrix product is one kernel for every client. Images are ordered by
client; layers without weights treat them as one batch.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semisfl.engine.kernels import stacked_conv, stacked_conv_relu_pool
from semisfl.engine.weights import Module, State, Weights, clone, distinct_names
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

log = logging.getLogger(__name__)

Call = Callable[[], Any]
Parallel = Callable[[Sequence[Call]], list[Any]]
"""Runs calls, side by side or in turn, and returns their results in order."""


# --- one pass of all copies ----------------------------------------------------------------------

Pass = Callable[[Tensor], Tensor]
Rows = Mapping[int, Tensor]
"""From the identity of a weight of the first copy to the weights of all copies, one row each."""
# Layers whose result for a row depends on that row alone.
ROW_BY_ROW = (
    nn.ReLU,
    nn.ReLU6,
    nn.GELU,
    nn.SiLU,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.Sigmoid,
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.Flatten,
    nn.Unflatten,
    nn.Identity,
)


class NotStacked(Exception):
    """Raised for a layer that is not computed for several copies at once; its text is the layer."""


def pass_of_copies(copies: Sequence[nn.Module], rows: Rows) -> Pass:
    """Return one pass of all ``copies`` of a module, which takes their images [n * copies, ...] client by client.

    ``rows``: the weights of all copies, by those of the first. Raises `NotStacked` if a layer does not support it.
    """
    first = copies[0]
    if type(first) in (nn.Sequential, Layers):
        assert isinstance(first, nn.Sequential)
        return _in_turn([_part(part, copies, rows) for part in parts_of(first)])
    return _part(first, copies, rows)


def _in_turn(passes: Sequence[Pass]) -> Pass:
    """Return one pass that runs the passes one after the other."""

    def run(x: Tensor) -> Tensor:
        for one in passes:
            x = one(x)
        return x

    return run


def _part(part: Part, copies: Sequence[nn.Module], rows: Rows) -> Pass:
    """Return the pass of one layer or block of all copies."""
    if isinstance(part, ConvBlock):
        return _conv_block(part, rows)
    if isinstance(part, NormBlock):
        if part.norm.momentum is None:
            raise NotStacked(f"{part.norm}, which keeps a cumulative average")
        block = part
        return lambda x: block.of_copies(x, lambda weight: rows[id(weight)])
    if isinstance(part, LinearBlock):
        linear = partial(_linear, part.linear, rows)
        return _in_turn([linear, F.relu]) if part.relu else linear
    if type(part) in (nn.Sequential, Layers):
        return pass_of_copies(_same(part, copies), rows)
    if type(part) is Residual:
        body, shortcut = (
            pass_of_copies([getattr(copy, way) for copy in _same(part, copies)], rows)
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
    """Return a weight of all copies; None for a bias that a layer does not have."""
    return None if weight is None else rows[id(weight)]


def _conv(conv: nn.Conv2d, rows: Rows, x: Tensor) -> Tensor:
    """Return the outputs of one convolution of all copies, as one grouped convolution or kernel."""
    return stacked_conv(x, rows[id(conv.weight)], _of(conv.bias, rows), *conv_arguments(conv))


def _conv_block(block: ConvBlock, rows: Rows) -> Pass:
    """Return the pass of convolution, pooling and ReLU: one kernel where there is one, else three operations."""
    conv = block.conv
    if conv.stride != (1, 1) or conv.dilation != (1, 1) or conv.groups != 1:
        pool = nn.MaxPool2d(2) if block.pool == 2 else nn.Identity()
        return _in_turn([partial(_conv, conv, rows), pool, F.relu])
    weight, bias = rows[id(conv.weight)], _of(conv.bias, rows)
    return lambda x: stacked_conv_relu_pool(x, weight, bias, conv.padding, block.pool)


def _linear(layer: nn.Linear, rows: Rows, x: Tensor) -> Tensor:
    """Return linear features [copies * n, d_out] of all copies by one batched matrix product."""
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


# --- the copies -----------------------------------------------------------------------------------


def in_turn(calls: Sequence[Call]) -> list[Any]:
    """Return the results of calls that run one after the other."""
    return [call() for call in calls]


class Stack:
    """``slots`` copies of ``template``; weight ``name`` of slot i is ``tensors[name][i]``.

    One elementwise operation on ``tensors`` then updates, averages or broadcasts the weights of all slots.

    Args:
        template: the module to copy; its own weights are not used afterwards.
        slots: the number of copies.
        trainable: whether the copies get gradients.
        dtype: what the layers compute in (`Weights`).
        together: whether all slots are computed at once, in which case ``parameters`` are those of the template
            with one row per slot. None: on a GPU, if the template is made of known layers.
    """

    def __init__(
        self,
        template: nn.Module,
        slots: int,
        trainable: bool = True,
        dtype: torch.dtype = torch.float32,
        together: bool | None = None,
    ) -> None:
        self.modules = [clone(template).requires_grad_(trainable) for _ in range(slots)]
        self._weights = Weights(nn.ModuleList(self.modules), dtype)
        self.tensors: State = {}
        self._outputs: list[Tensor] = []
        states = [module.state_dict() for module in self.modules]
        for name, first in states[0].items():
            if first.is_floating_point():
                self.tensors[name] = _rows([state[name] for state in states])
            else:
                self.tensors[name] = torch.stack([state[name] for state in states])
                for slot, module in enumerate(self.modules):
                    module.get_buffer(name).data = self.tensors[name][slot]
        self._distinct = distinct_names(self.modules[0])
        stacked_parameters = [
            self.rows_of(row).requires_grad_(trainable)
            for row in zip(*(module.parameters() for module in self.modules), strict=True)
        ]
        if together is None:
            together = self._weights.work is not None and self._weights.work.is_cuda
        self._pass = self._together(stacked_parameters, say=trainable) if together else None
        self.parameters: list[Tensor] = (
            stacked_parameters
            if self._pass is not None
            else [parameter for module in self.modules for parameter in module.parameters()]
        )

    def _together(self, parameters: Sequence[Tensor], say: bool) -> Pass | None:
        """Return the pass of all slots at once, or None if a layer does not support it."""
        first = self.modules[0]
        rows: Rows = {
            **{id(own): rows for own, rows in zip(first.parameters(), parameters, strict=True)},
            # A buffer that no state holds belongs to a layer that is not stacked.
            **{id(b): self.tensors[n] for n, b in first.named_buffers() if n in self.tensors},
        }
        try:
            return pass_of_copies(self.modules, rows)
        except NotStacked as layer:
            if say:
                log.warning("clients' models are computed one by one, slower, due to %s", layer)
            return None

    @staticmethod
    def rows_of(slots: Sequence[nn.Parameter]) -> Tensor:
        """Return one parameter of every slot as one tensor, with its `Home` if it is a working copy."""
        rows = _rows([parameter.detach() for parameter in slots])
        home = getattr(slots[0], "home", None)
        if home is None:
            rows.slots = len(slots)  # type: ignore[attr-defined]
        else:
            rows.home = home._replace(rows=len(slots), stride=rows.stride(0))  # type: ignore[attr-defined]
        return rows

    def load(self, state: State, slot: int | None = None) -> None:
        """Give every slot, or the one ``slot``, the weights of ``state``."""
        for name, tensor in self.tensors.items():
            (tensor if slot is None else tensor[slot]).copy_(state[name])
        self._weights.refresh()

    def state(self, slot: int) -> State:
        """Return the weights of one slot, as views."""
        return {name: tensor[slot] for name, tensor in self.tensors.items()}

    def mean(self) -> State:
        """Return the plain mean over the slots, with which a round ends; integer counters are averaged and truncated."""
        return {name: mean_of_rows(tensor) for name, tensor in self.tensors.items()}

    def follow(self, other: "Stack", decay: Tensor) -> None:
        """Follow ``other`` as a moving average, slot by slot: w = decay w + (1 - decay) w_other.

        ``decay``: one number per slot, [slots]. Integer buffers are copied.
        """
        for name, tensor in self.tensors.items():
            if not tensor.is_floating_point():
                tensor.copy_(other.tensors[name])
            elif name in self._distinct:
                weight = (1 - decay).view(-1, *[1] * (tensor.dim() - 1))
                tensor.lerp_(other.tensors[name], weight)
        self._weights.refresh()

    def __call__(self, x: Tensor, parallel: Parallel = in_turn) -> Tensor:
        """Return the outputs of each slot's module on its share of the rows; ``parallel`` runs the calls."""
        return self.join(parallel(self.calls(x)) if self._pass is None else [self._pass(x)])

    def calls(self, x: Tensor) -> list[Callable[[], Tensor]]:
        """Return the passes: one per slot over its share of the rows, or one for all; `join` joins the results."""
        if self._pass is not None:
            return [partial(self._pass, x)]
        shares = x.chunk(len(self.modules))
        return [partial(module, share) for module, share in zip(self.modules, shares, strict=True)]

    def join(self, outputs: list[Tensor]) -> Tensor:
        """Return the outputs of `calls` as one tensor [n, ...], and keep them for `gradients` where that needs them."""
        # Kept for `gradients`, which a GPU does not use; there they would waste memory.
        self._outputs = [] if outputs[0].is_cuda else outputs
        return outputs[0] if self._pass is not None else torch.cat(outputs)

    def gradients(self, upstream: Tensor, parallel: Parallel = in_turn) -> list[Tensor | None]:
        """Return the gradients of `parameters`, from the gradient ``upstream`` [n, ...] of the last call's result.

        On a CPU only: a GPU computes them inside the captured step.
        """
        outputs, self._outputs = self._outputs, []
        if self._pass is not None:
            return list(
                torch.autograd.grad(outputs[0], self.parameters, upstream, allow_unused=True)
            )
        rows = upstream.chunk(len(self.modules))
        calls = [
            partial(
                torch.autograd.grad, output, list(module.parameters()), share, allow_unused=True
            )
            for output, module, share in zip(outputs, self.modules, rows, strict=True)
        ]
        return [gradient for slot in parallel(calls) for gradient in slot]


def mean_of_rows(rows: Tensor) -> Tensor:
    """Return the mean over the first dimension of ``rows`` [slots, ...].

    Counters are averaged as doubles and truncated.
    """
    return rows.mean(0) if rows.is_floating_point() else rows.double().mean(0).to(rows.dtype)


def _rows(slots: Sequence[Tensor]) -> Tensor:
    """Return one weight of all slots as one view; the slots have a constant stride in memory."""
    first, following = slots[0], slots[1:2] or slots
    stride = following[0].storage_offset() - first.storage_offset()
    return first.as_strided((len(slots), *first.shape), (stride, *first.stride()))
