"""Fused GPU kernels. Imported only on a GPU with Triton.

`pool_bias_relu`: PyTorch's own pooling keeps 64-bit positions and takes three passes where one
will do; together with bias and ReLU it was a third of a client's step on an H200.
`sgd` and `follow`: one pass over memory for a step (or a moving average) of a whole model and the
refreshing of its working copy.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from semisfl.config import OptimizerConfig

BLOCK = 1024
# `which` of an element whose ReLU is closed: nothing flows back.
CLOSED = tl.constexpr(4)


@triton.jit
def _forward(x, bias, out, which, total, channels, width_out, height_out, width, height, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < total
    channel = offsets % channels
    pixel = offsets // channels
    column = pixel % width_out
    line = pixel // width_out
    start = ((line // height_out * height + 2 * (line % height_out)) * width + 2 * column) * channels + channel
    best = tl.load(x + start, mask=inside).to(tl.float32)
    chosen = tl.zeros([BLOCK], dtype=tl.int32)
    for corner in tl.static_range(1, 4):
        step = (corner // 2 * width + corner % 2) * channels
        value = tl.load(x + start + step, mask=inside).to(tl.float32)
        # A NaN wins, as in PyTorch: it must not be hidden.
        wins = (value > best) | (value != value)
        best = tl.where(wins, value, best)
        chosen = tl.where(wins, corner, chosen)
    sum_ = best + tl.load(bias + channel, mask=inside).to(tl.float32)
    open_ = (sum_ > 0) | (sum_ != sum_)
    tl.store(out + offsets, tl.where(open_, sum_, 0.0).to(out.dtype.element_ty), mask=inside)
    tl.store(which + offsets, tl.where(open_, chosen, CLOSED).to(tl.uint8), mask=inside)


@triton.jit
def _backward(grad, which, grad_x, total, channels, width_out, height_out, width, height, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < total
    channel = offsets % channels
    pixel = offsets // channels
    column = pixel % width_out
    line = pixel // width_out
    start = ((line // height_out * height + 2 * (line % height_out)) * width + 2 * column) * channels + channel
    value = tl.load(grad + offsets, mask=inside)
    chosen = tl.load(which + offsets, mask=inside).to(tl.int32)
    for corner in tl.static_range(0, 4):
        step = (corner // 2 * width + corner % 2) * channels
        tl.store(grad_x + start + step, tl.where(chosen == corner, value, 0.0).to(value.dtype), mask=inside)


class _PoolBiasRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        images, channels, height, width = x.shape
        shape = (images, channels, height // 2, width // 2)
        out = torch.empty(shape, device=x.device, dtype=x.dtype, memory_format=torch.channels_last)
        which = torch.empty(shape, device=x.device, dtype=torch.uint8, memory_format=torch.channels_last)
        sizes = (out.numel(), channels, width // 2, height // 2, width, height)
        _forward[(triton.cdiv(out.numel(), BLOCK),)](x, bias, out, which, *sizes, BLOCK=BLOCK)
        ctx.save_for_backward(which)
        ctx.sizes, ctx.shape = sizes, x.shape
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        (which,) = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        _, _, height, width = ctx.shape
        # The kernel writes every pixel that was pooled; an odd last row or column was not.
        make = torch.zeros if height % 2 or width % 2 else torch.empty
        grad_x = make(ctx.shape, device=grad.device, dtype=grad.dtype).contiguous(
            memory_format=torch.channels_last
        )
        _backward[(triton.cdiv(grad.numel(), BLOCK),)](grad, which, grad_x, *ctx.sizes, BLOCK=BLOCK)
        grad_bias = grad.masked_fill(which == 4, 0).sum((0, 2, 3), dtype=torch.float32)
        return grad_x, grad_bias


def pool_bias_relu(x: Tensor, bias: Tensor) -> Tensor:
    """relu(max_pool2d(x, 2) + bias), for ``x`` channels-last on a GPU."""
    return _PoolBiasRelu.apply(x.contiguous(memory_format=torch.channels_last), bias)


@triton.jit
def _sgd(
    master, work, momentum, gradient, lr, total, decay, mu, NESTEROV: tl.constexpr, BLOCK: tl.constexpr
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < total
    weight = tl.load(master + offsets, mask=inside)
    slope = tl.load(gradient + offsets, mask=inside).to(tl.float32) + decay * weight
    speed = mu * tl.load(momentum + offsets, mask=inside) + slope
    change = slope + mu * speed if NESTEROV else speed
    weight -= tl.load(lr) * change
    tl.store(momentum + offsets, speed, mask=inside)
    tl.store(master + offsets, weight, mask=inside)
    tl.store(work + offsets, weight.to(work.dtype.element_ty), mask=inside)


def sgd(
    master: Tensor, work: Tensor, momentum: Tensor, gradient: Tensor, lr: Tensor, config: OptimizerConfig
) -> None:
    """One SGD step of flat full-precision weights; ``work`` is their copy in another type."""
    _sgd[(triton.cdiv(master.numel(), BLOCK),)](
        master,
        work,
        momentum,
        gradient,
        lr,
        master.numel(),
        config.weight_decay,
        config.momentum,
        NESTEROV=config.nesterov,
        BLOCK=BLOCK,
    )


@triton.jit
def _follow(target, source, work, keep, total, copied, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < total
    mine = tl.load(target + offsets, mask=inside)
    mine += (tl.load(source + offsets, mask=inside) - mine) * (1 - tl.load(keep))
    tl.store(target + offsets, mine, mask=inside)
    tl.store(work + offsets, mine.to(work.dtype.element_ty), mask=offsets < copied)


def follow(target: Tensor, source: Tensor, work: Tensor, keep: Tensor) -> None:
    """target <- keep target + (1 - keep) source; ``work`` copies the head of ``target``."""
    total = target.numel()
    _follow[(triton.cdiv(total, BLOCK),)](target, source, work, keep, total, work.numel(), BLOCK=BLOCK)
