# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""Fused GPU kernels. Imported only on a GPU with Triton.

`bias_relu`: PyTorch's own pooling keeps 64-bit positions and takes three passes where one
will do; together with bias and ReLU it was a large part of a client's step on an H200.
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
# A program of the pooling kernels sees so many pixels of so many channels.
TILE = {"PIXELS": 32, "CHANNELS": 64}
# `which` of an element whose ReLU is closed: nothing flows back.
CLOSED = tl.constexpr(4)


@triton.jit
def _tile(
    pixels,
    channels,
    width_out,
    height_out,
    width,
    height,
    POOL: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Offsets of a tile in the pooled and in the unpooled image, which of it exists, its channels."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = (pixel < pixels)[:, None] & (channel < channels)[None, :]
    line = pixel // width_out
    row = line // height_out * height + POOL * (line % height_out)
    source = row * width + POOL * (pixel % width_out)
    return (
        pixel[:, None] * channels + channel[None, :],
        source[:, None] * channels + channel[None, :],
        inside,
        channel,
    )


@triton.jit
def _forward(
    x, bias, out, which, pixels, channels, width_out, height_out, width, height,
    POOL: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    target, source, inside, channel = _tile(
        pixels, channels, width_out, height_out, width, height, POOL, PIXELS, CHANNELS
    )
    best = tl.load(x + source, mask=inside).to(tl.float32)
    chosen = tl.zeros([PIXELS, CHANNELS], dtype=tl.int32)
    for corner in tl.static_range(1, POOL * POOL):
        step = (corner // 2 * width + corner % 2) * channels
        value = tl.load(x + source + step, mask=inside).to(tl.float32)
        # A NaN wins, as in PyTorch: it must not be hidden.
        wins = (value > best) | (value != value)
        best = tl.where(wins, value, best)
        chosen = tl.where(wins, corner, chosen)
    best += tl.load(bias + channel, mask=channel < channels).to(tl.float32)[None, :]
    is_open = (best > 0) | (best != best)
    tl.store(out + target, tl.where(is_open, best, 0.0).to(out.dtype.element_ty), mask=inside)
    tl.store(which + target, tl.where(is_open, chosen, CLOSED).to(tl.uint8), mask=inside)


@triton.jit
def _backward(
    grad, which, grad_x, sums, pixels, channels, width_out, height_out, width, height,
    POOL: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    target, source, inside, channel = _tile(
        pixels, channels, width_out, height_out, width, height, POOL, PIXELS, CHANNELS
    )
    value = tl.load(grad + target, mask=inside, other=0.0)
    chosen = tl.load(which + target, mask=inside, other=CLOSED).to(tl.int32)
    for corner in tl.static_range(0, POOL * POOL):
        step = (corner // 2 * width + corner % 2) * channels
        tl.store(
            grad_x + source + step,
            tl.where(chosen == corner, value, 0.0).to(value.dtype),
            mask=inside,
        )
    total = tl.sum(tl.where(chosen == CLOSED, 0.0, value.to(tl.float32)), axis=0)
    tl.store(sums + tl.program_id(0) * channels + channel, total, mask=channel < channels)


class _BiasRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, pool: int) -> Tensor:
        images, channels, height, width = x.shape
        shape = (images, channels, height // pool, width // pool)
        out = torch.empty(shape, device=x.device, dtype=x.dtype, memory_format=torch.channels_last)
        which = torch.empty(
            shape, device=x.device, dtype=torch.uint8, memory_format=torch.channels_last
        )
        pixels = out.numel() // channels
        ctx.sizes = (pixels, channels, width // pool, height // pool, width, height)
        ctx.grid = (triton.cdiv(pixels, TILE["PIXELS"]), triton.cdiv(channels, TILE["CHANNELS"]))
        _forward[ctx.grid](x, bias, out, which, *ctx.sizes, POOL=pool, **TILE)
        ctx.save_for_backward(which)
        ctx.shape, ctx.pool = x.shape, pool
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (which,) = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        grad_x = torch.empty(
            ctx.shape, device=grad.device, dtype=grad.dtype, memory_format=torch.channels_last
        )
        if ctx.shape[2] % ctx.pool or ctx.shape[3] % ctx.pool:
            # The kernel writes every pixel that was pooled; an odd last row or column was not.
            grad_x.zero_()
        sums = torch.empty(ctx.grid[0], ctx.shape[1], device=grad.device)
        _backward[ctx.grid](grad, which, grad_x, sums, *ctx.sizes, POOL=ctx.pool, **TILE)
        return grad_x, sums.sum(0), None


def bias_relu(x: Tensor, bias: Tensor, pool: int) -> Tensor:
    """relu(max_pool2d(x, pool) + bias), pool 1 or 2, for ``x`` on a GPU; the result is channels-last."""
    return _BiasRelu.apply(x.contiguous(memory_format=torch.channels_last), bias, pool)


@triton.jit
def _sgd(
    master,
    work,
    momentum,
    gradient,
    lr,
    total,
    decay,
    mu,
    NESTEROV: tl.constexpr,
    BLOCK: tl.constexpr,
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
    master: Tensor,
    work: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    lr: Tensor,
    config: OptimizerConfig,
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
    _follow[(triton.cdiv(total, BLOCK),)](
        target, source, work, keep, total, work.numel(), BLOCK=BLOCK
    )


def try_out() -> None:
    """Compile and run the smallest kernel, so that a machine on which that fails is known early."""
    target, source = torch.zeros(8, device="cuda"), torch.ones(8, device="cuda")
    follow(
        target,
        source,
        torch.zeros(8, device="cuda", dtype=torch.bfloat16),
        torch.zeros((), device="cuda"),
    )
    if not torch.equal(target, source):
        raise RuntimeError("a fused kernel gave a wrong result")
