# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-any-return"
"""Unit vectors and cross-entropy, one program per row; PyTorch launches a dozen tiny kernels for each.

Both compute in float32 whatever the input's type, as their plain forms do.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from semisfl.engine.kernels import plain

SHORTEST = tl.constexpr(plain.SHORTEST)
# The longest row that one program can hold.
WIDEST = 16384
# How many values one program multiplies.
SCALED = 1024


@triton.jit
def _unit(x, out, lengths, width, BLOCK: tl.constexpr):
    """Write a row at unit length, and its length before; a row shorter than `SHORTEST` becomes 0."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    length = tl.sqrt(tl.sum(value * value, axis=0))
    tl.store(lengths + row, length)
    value = tl.where(length < SHORTEST, 0.0, value / length)
    tl.store(out + row * width + column, value, mask=inside)


@triton.jit
def _unit_back(grad, out, lengths, of_x, width, BLOCK: tl.constexpr):
    """Write the gradient of a row: the part of the upstream gradient across the unit vector, over the length."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
    unit = tl.load(out + row * width + column, mask=inside, other=0.0)
    length = tl.load(lengths + row)
    # The gradient has no part along the unit vector.
    along = tl.sum(value * unit, axis=0)
    value = tl.where(length < SHORTEST, 0.0, (value - along * unit) / length)
    tl.store(of_x + row * width + column, value.to(of_x.dtype.element_ty), mask=inside)


class _Unit(torch.autograd.Function):
    """Unit rows [rows, width]; the backward pass reads the result and the lengths, not the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the rows of ``x`` divided by their lengths; lengths are kept for the gradient."""
        rows, width = x.shape
        out = torch.empty(x.shape, device=x.device)
        lengths = torch.empty(rows, device=x.device)
        _unit[(rows,)](x, out, lengths, width, BLOCK=triton.next_power_of_2(width))
        ctx.save_for_backward(out, lengths)
        ctx.dtype = x.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return the part of each row's gradient that turns the row; its length has no part in the result."""
        out, lengths = ctx.saved_tensors
        rows, width = out.shape
        of_x = torch.empty_like(out, dtype=ctx.dtype)
        _unit_back[(rows,)](
            grad.contiguous(), out, lengths, of_x, width, BLOCK=triton.next_power_of_2(width)
        )
        return of_x


def fused_unit(x: Tensor) -> Tensor:
    """Return `unit_rows` of ``x`` [rows, width] with ``width`` up to `WIDEST`, in float32."""
    return _Unit.apply(x.contiguous())


@triton.jit
def _entropy(
    logits, labels, weights, losses, gradients, rows, classes,
    WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a row's contribution to the mean, and the gradient of the mean with respect to the row."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < classes
    value = tl.load(logits + row * classes + column, mask=inside, other=float("-inf"))
    value = value.to(tl.float32)
    label = tl.load(labels + row)
    weight = tl.load(weights + row).to(tl.float32) / rows if WEIGHTED else 1.0 / rows
    weight = tl.where(label < 0, 0.0, weight)
    highest = tl.max(value, axis=0)
    powers = tl.where(inside, tl.exp(value - highest), 0.0)
    total = tl.sum(powers, axis=0)
    is_label = column == label
    chosen = tl.sum(tl.where(is_label, value, 0.0), axis=0)
    loss = tl.where(label < 0, 0.0, (tl.log(total) + highest - chosen) * weight)
    tl.store(losses + row, loss)
    gradient = (powers / total - is_label.to(tl.float32)) * weight
    gradient = gradient.to(gradients.dtype.element_ty)
    tl.store(gradients + row * classes + column, gradient, mask=inside)


@triton.jit
def _scaled(values, scale, out, size, BLOCK: tl.constexpr):
    """Write ``values`` times the scalar ``scale``."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + place, mask=place < size).to(tl.float32) * tl.load(scale)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=place < size)


class _Entropy(torch.autograd.Function):
    """The mean cross-entropy of logits [rows, classes].

    The forward pass computes the gradient of the mean as well, while a row is at hand; the backward pass
    only multiplies it by the upstream scalar.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """Return the mean cross-entropy, weighted if ``weights`` [rows] are given, as a scalar."""
        rows, classes = logits.shape
        losses = torch.empty(rows, device=logits.device)
        gradients = torch.empty_like(logits)
        _entropy[(rows,)](
            logits, labels, labels if weights is None else weights, losses, gradients,
            rows, classes, WEIGHTED=weights is not None, BLOCK=triton.next_power_of_2(classes),
        )  # fmt: skip
        ctx.save_for_backward(gradients)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the logits: the one that was computed with the loss, times ``grad``."""
        (gradients,) = ctx.saved_tensors
        out, size = torch.empty_like(gradients), gradients.numel()
        # PyTorch takes ten times as long when the scalar has another type.
        _scaled[(triton.cdiv(size, SCALED),)](gradients, grad, out, size, BLOCK=SCALED)
        return out, None, None


def fused_entropy(logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    """Return `cross_entropy`: the mean over the rows of logits [rows, classes], classes up to `WIDEST`.

    ``labels`` [rows]: -1 counts 0. ``weights`` [rows] receive no gradient.
    """
    return _Entropy.apply(logits.contiguous(), labels, weights)
