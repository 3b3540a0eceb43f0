# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""Bias, ReLU and 2 x 2 pooling in one pass.

PyTorch's own pooling keeps 64-bit positions and takes three passes where one will do; together
with bias and ReLU it was a large part of a client's step on an H200.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from semisfl.engine.kernels.partial_sums import MOST_PARTS, added_up

# Pixels and channels per tile of the pooling kernels.
TILE = {"PIXELS": 32, "CHANNELS": 64}
# `which` of an element whose ReLU is closed: its gradient is zero.
CLOSED = tl.constexpr(4)


@triton.jit
def _tile(
    block,
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
    """Return a tile's offsets in the pooled and the unpooled image, the mask of valid ones, its channels."""
    pixel = block * PIXELS + tl.arange(0, PIXELS)
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
    """Write the pooled results of a tile, and the position of each maximum, `CLOSED` where the ReLU is closed."""
    target, source, inside, channel = _tile(
        tl.program_id(0), pixels, channels, width_out, height_out, width, height,
        POOL, PIXELS, CHANNELS,
    )  # fmt: skip
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
    grad, which, grad_x, sums, pixels, channels, width_out, height_out, width, height, turns,
    POOL: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of some tiles before pooling, and the sum of those that are open, for the bias."""
    client, parts = tl.program_id(2).to(tl.int64), tl.num_programs(0)
    grad += client * pixels * channels
    which += client * pixels * channels
    grad_x += client * pixels // (width_out * height_out) * (width * height * channels)
    total = tl.zeros([CHANNELS], tl.float32)
    for turn in range(turns):
        target, source, inside, _ = _tile(
            tl.program_id(0) + turn * parts, pixels, channels, width_out, height_out, width, height,
            POOL, PIXELS, CHANNELS,
        )  # fmt: skip
        value = tl.load(grad + target, mask=inside, other=0.0)
        chosen = tl.load(which + target, mask=inside, other=CLOSED).to(tl.int32)
        for corner in tl.static_range(0, POOL * POOL):
            step = (corner // 2 * width + corner % 2) * channels
            tl.store(
                grad_x + source + step,
                tl.where(chosen == corner, value, 0.0).to(value.dtype),
                mask=inside,
            )
        total += tl.sum(tl.where(chosen == CLOSED, 0.0, value.to(tl.float32)), axis=0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    part = tl.program_id(0) * tl.num_programs(2) + tl.program_id(2)
    tl.store(sums + part * channels + channel, total, mask=channel < channels)


def unpool(
    grad: Tensor,
    which: Tensor,
    shape: tuple[int, ...],
    pool: int,
    bias_dtype: torch.dtype,
    clients: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return the gradients before ReLU and pooling, [*shape], and of the bias, [clients, channels].

    ``grad`` and ``which`` have the pooled shape; ``which`` says which pixel of a window was the maximum.
    """
    _, channels, height, width = shape
    out = torch.empty(
        shape, device=grad.device, dtype=grad.dtype, memory_format=torch.channels_last
    )
    if height % pool or width % pool:
        # The kernel writes every pixel that was pooled; an odd last row or column was not.
        out.zero_()
    pixels = grad.numel() // channels // clients
    blocks = triton.cdiv(pixels, TILE["PIXELS"])
    grid = (min(blocks, MOST_PARTS), triton.cdiv(channels, TILE["CHANNELS"]), clients)
    sums = torch.empty(grid[0], clients, channels, device=grad.device)
    _backward[grid](
        grad, which, out, sums, pixels, channels, width // pool, height // pool, width, height,
        triton.cdiv(blocks, grid[0]), POOL=pool, **TILE,
    )  # fmt: skip
    return out, added_up(sums, bias_dtype)


def check_size(*tensors: Tensor) -> None:
    """Raise ValueError for tensors that the kernels' 32-bit offsets cannot address."""
    if any(tensor.numel() >= 2**31 for tensor in tensors):
        raise ValueError(
            f"a layer's {max(t.numel() for t in tensors):,} values are more than the fused kernels "
            "can count; set clients.batch, clients.active or data.size lower"
        )


class _BiasRelu(torch.autograd.Function):
    """Bias, ReLU and pooling; the backward pass reads the positions of the maxima alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, pool: int) -> Tensor:
        """Return relu(max_pool(x) + b): pooling first, as both keep the order of values."""
        images, channels, height, width = x.shape
        shape = (images, channels, height // pool, width // pool)
        out = torch.empty(shape, device=x.device, dtype=x.dtype, memory_format=torch.channels_last)
        which = torch.empty(
            shape, device=x.device, dtype=torch.uint8, memory_format=torch.channels_last
        )
        check_size(x)
        pixels = out.numel() // channels
        _forward[(triton.cdiv(pixels, TILE["PIXELS"]), triton.cdiv(channels, TILE["CHANNELS"]))](
            x, bias, out, which,
            pixels, channels, width // pool, height // pool, width, height, POOL=pool, **TILE,
        )  # fmt: skip
        ctx.save_for_backward(which)
        ctx.shape, ctx.pool, ctx.bias_dtype = x.shape, pool, bias.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradient at each square's largest value, and the bias's."""
        (which,) = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        of_x, of_bias = unpool(grad, which, ctx.shape, ctx.pool, ctx.bias_dtype)
        return of_x, of_bias[0], None


def bias_relu(x: Tensor, bias: Tensor, pool: int) -> Tensor:
    """Return relu(max_pool2d(x, pool) + bias), pool 1 or 2, channels-last, for ``x`` on a GPU."""
    return _BiasRelu.apply(x.contiguous(memory_format=torch.channels_last), bias, pool)
