# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-any-return"
"""Convolution, bias, ReLU and 2 x 2 pooling for several clients, each with weights of its own.

A client's batch fills a third of a large GPU at most; one launch for all of them fills it, and
bias, ReLU and pooling are done before anything is written.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from semisfl.engine.kernels.gathered import convolve, to_few_weights, to_input, to_weight
from semisfl.engine.kernels.pooling import check_size, unpool

# So many entries of a weight are gathered one by one.
FEW = 128
# Programs that share a reduction over all pixels.
SPLITS = 512
# Fewer than two a multiprocessor leave a part of a large GPU idle.
PROGRAMS = 256


class Geometry(NamedTuple):
    """What the kernels are compiled for."""

    H: int
    W: int
    OH: int
    OW: int
    CI: int
    CO: int
    KH: int
    KW: int
    PAD_H: int
    PAD_W: int


def _few(shape: Geometry) -> bool:
    return shape.KH * shape.KW * shape.CI <= FEW


# Sizes of tiles [BM, BN], gathered BK deep, as they were fastest on an H200.


def _tile(rows: int, columns: int, depth: int, clients: int) -> dict[str, int]:
    if columns <= 64:
        deep = 64 if depth % 64 == 0 else 32
        return {"BM": 128, "BN": _power(columns), "BK": deep, "num_warps": 4, "num_stages": 4}
    enough = triton.cdiv(rows, 128) * triton.cdiv(columns, 128) * clients >= PROGRAMS
    return {"BM": 128 if enough else 64, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3}


def _weight_tile(shape: Geometry) -> dict[str, int]:
    if shape.CI % 128 == 0:
        return {"BM": 128, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3}
    down, across = (128 if shape.CI > 64 else 64), min(64, _power(shape.CI))
    return {"BM": down, "BN": across, "BK": 64, "num_warps": 4, "num_stages": 4}


def _few_tile(shape: Geometry) -> dict[str, int]:
    return {"BM": 128, "BN": min(64, _power(shape.CO)), "BK": 32, "num_warps": 4}


def _few_weights_tile(shape: Geometry) -> dict[str, int]:
    across, down = _power(shape.KH * shape.KW * shape.CI), min(64, _power(shape.CO))
    return {"BM": down, "BN": across, "BK": 128 if across <= 32 else 64, "num_warps": 4}


def _power(size: int) -> int:
    """The next power of two a matrix product can have as a side."""
    return max(16, triton.next_power_of_2(size))


class _ConvRelu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        pad: tuple[int, int],
        pool: int,
        keep: bool,
    ) -> Tensor:
        clients, channels_out, channels, *kernel = weight.shape
        images, height, width = len(x) // clients, x.shape[2], x.shape[3]
        shape = Geometry(
            height,
            width,
            height + 2 * pad[0] - kernel[0] + 1,
            width + 2 * pad[1] - kernel[1] + 1,
            channels,
            channels_out,
            kernel[0],
            kernel[1],
            *pad,
        )
        size = (len(x), channels_out, shape.OH // pool, shape.OW // pool)
        last = torch.channels_last
        out = torch.empty(size, device=x.device, dtype=x.dtype, memory_format=last)
        which = (
            torch.empty(size, device=x.device, dtype=torch.uint8, memory_format=last)
            if keep
            else out
        )
        check_size(x, out)
        few, windows = _few(shape), images * size[2] * size[3]
        tile = _few_tile(shape) if few else _tile(windows, channels_out, channels, clients)
        grid = (triton.cdiv(windows, tile["BM"]), triton.cdiv(channels_out, tile["BN"]), clients)
        convolve[grid](
            x, weight, bias, out, which, weight.stride(0), bias.stride(0), images,
            *shape, POOL=pool, KEEP=keep, GATHER=few, **tile,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, which)
        ctx.shape, ctx.pool, ctx.images, ctx.clients = shape, pool, images, clients
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, which = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        if _few(ctx.shape) and not ctx.needs_input_grad[0]:
            return None, *_few_gradients(ctx, x, grad, which), None, None, None
        shape, images, clients = ctx.shape, ctx.images, ctx.clients
        full = (len(x), shape.CO, shape.OH, shape.OW)
        grad, of_bias = unpool(grad, which, full, ctx.pool, clients)
        of_input = None
        if ctx.needs_input_grad[0]:
            of_input = torch.empty_like(x)
            pixels = images * shape.H * shape.W
            tile = _tile(pixels, shape.CI, shape.CO, clients)
            grid = (
                triton.cdiv(pixels, tile["BM"]),
                triton.cdiv(shape.CI, tile["BN"]),
                clients,
            )
            to_input[grid](grad, weight, of_input, weight.stride(0), *shape, IMAGES=images, **tile)
        of_weight = _weight_room(shape, clients, x.dtype, x.device)
        tile = _weight_tile(shape)
        grid = (
            triton.cdiv(shape.CO, tile["BM"]),
            shape.KH * shape.KW * triton.cdiv(shape.CI, tile["BN"]),
            clients,
        )
        to_weight[grid](x, grad, of_weight, *shape, IMAGES=images, **tile)
        return of_input, of_weight.movedim(-1, 2), of_bias, None, None, None


def _weight_room(
    shape: Geometry, clients: int, dtype: torch.dtype, device: torch.device, *parts: int
) -> Tensor:
    size = (*parts, clients, shape.CO, shape.KH, shape.KW, shape.CI)
    return torch.empty(size, dtype=dtype, device=device)


def _few_gradients(ctx: Any, x: Tensor, grad: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
    shape, clients = ctx.shape, ctx.clients
    tile = _few_weights_tile(shape)
    blocks = triton.cdiv(grad.numel() // clients // shape.CO, tile["BK"])
    parts = min(blocks, max(1, SPLITS // clients))
    out = _weight_room(shape, clients, torch.float32, x.device, parts)
    sums = torch.empty(parts, clients, shape.CO, device=x.device)
    across = triton.cdiv(shape.KH * shape.KW * shape.CI, tile["BN"])
    grid = (parts, across * triton.cdiv(shape.CO, tile["BM"]), clients)
    to_few_weights[grid](
        x, grad, which, out, sums, *shape,
        IMAGES=ctx.images, POOL=ctx.pool, PARTS=parts, TURNS=triton.cdiv(blocks, parts), **tile,
    )  # fmt: skip
    return out.sum(0).movedim(-1, 2), sums.sum(0)


def stacked_convolution(
    x: Tensor, weight: Tensor, bias: Tensor, padding: Sequence[int], pool: int
) -> Tensor:
    """`stacked_conv_relu_pool`; the values of ``weight`` lie channels-last, and so do the result's."""
    keep = torch.is_grad_enabled() and (weight.requires_grad or x.requires_grad)
    x = x.contiguous(memory_format=torch.channels_last)
    return _ConvRelu.apply(x, weight, bias, tuple(padding), pool, keep)
