# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-any-return"
"""Convolution, bias, ReLU and 2 x 2 pooling for several clients, each with weights of its own.

The batch of one client fills at most a third of a large GPU; one launch for all clients fills it.
Bias, ReLU and pooling are applied before the result is written. Of a pooled window only the maximum is
written, with its position in the window as a byte: all that the backward pass needs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from semisfl.engine.kernels.gathered import convolve, to_few_weights, to_input, to_weight
from semisfl.engine.kernels.partial_sums import added_up
from semisfl.engine.kernels.pooling import check_size, unpool

# Weights with at most this many entries are gathered entry by entry.
FEW = 128
# How many programs share a reduction over all pixels.
SPLITS = 512
# Fewer than two programs per multiprocessor leave a part of a large GPU idle.
PROGRAMS = 256


class Geometry(NamedTuple):
    """The sizes that the kernels are compiled for; a kernel is compiled again for other sizes.

    Height and width before (H, W) and after (OH, OW) the convolution, channels in and out (CI, CO), the
    weight's rows and columns (KH, KW), padding (PAD_H, PAD_W) and strides (DOWN, RIGHT).
    """

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
    DOWN: int = 1
    RIGHT: int = 1


def few(shape: Geometry) -> bool:
    """Return whether the weight is so small that its entries are gathered one by one."""
    return shape.KH * shape.KW * shape.CI <= FEW


# Tiles of [BM, BN] with BK values per step: the fastest sizes on an H200.


def _tile(rows: int, columns: int, depth: int, clients: int) -> dict[str, int]:
    """Return the tile for a product of [rows, depth] with [depth, columns], per client."""
    if columns <= 64:
        deep = 64 if depth % 64 == 0 else 32
        return {"BM": 128, "BN": _power(columns), "BK": deep, "num_warps": 4, "num_stages": 4}
    enough = triton.cdiv(rows, 128) * triton.cdiv(columns, 128) * clients >= PROGRAMS
    return {"BM": 128 if enough else 64, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3}


def _weight_tile(shape: Geometry) -> dict[str, int]:
    """Return the tile for the gradient of a tap: output channels by input channels."""
    if shape.CI % 128 == 0:
        return {"BM": 128, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3}
    down, across = (128 if shape.CI > 64 else 64), min(64, _power(shape.CI))
    return {"BM": down, "BN": across, "BK": 64, "num_warps": 4, "num_stages": 4}


def _few_tile(shape: Geometry) -> dict[str, int]:
    """Return the tile where weights are gathered entry by entry."""
    return {"BM": 128, "BN": min(64, _power(shape.CO)), "BK": 32, "num_warps": 4}


def _few_weights_tile(shape: Geometry) -> dict[str, int]:
    """Return the tile for the gradient of a small weight: output channels by all its entries."""
    across, down = _power(shape.KH * shape.KW * shape.CI), min(64, _power(shape.CO))
    return {"BM": down, "BN": across, "BK": 128 if across <= 32 else 64, "num_warps": 4}


def _power(size: int) -> int:
    """Return the next power of two that a side of a matrix product can have."""
    return max(16, triton.next_power_of_2(size))


class Epilogue(NamedTuple):
    """The operations applied to a convolution's results before they are written."""

    relu: bool = False
    pool: int = 1


class _Conv(torch.autograd.Function):
    """Convolution with its epilogue; the gradients are `to_input`, `to_weight` and, for images, `to_few_weights`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        shape: Geometry,
        after: Epilogue,
        keep: bool,
    ) -> Tensor:
        """Return the convolution of every copy with its own weights, ReLU and pooling included."""
        out, which = convolved(x, weight, bias, None, shape, after, keep)
        ctx.save_for_backward(x, weight, which)
        ctx.shape, ctx.after = shape, after
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.clients, ctx.images = len(weight), len(x) // len(weight)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of images, weights and biases, those of few input channels by kernels of their own."""
        x, weight, which = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        if few(ctx.shape) and not ctx.needs_input_grad[0]:
            of_weight, sums = _few_gradients(ctx, x, grad, which)
            return None, of_weight, sums, None, None, None
        shape, images, clients = ctx.shape, ctx.images, ctx.clients
        full = (len(x), shape.CO, shape.OH, shape.OW)
        of_bias: Tensor | None = None
        if ctx.after.relu:
            grad, of_bias = unpool(
                grad, which, full, ctx.after.pool, ctx.bias_dtype or grad.dtype, clients
            )
        elif ctx.bias_dtype is not None:
            of_bias = grad.unflatten(0, (clients, -1)).sum((1, 3, 4))
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


def convolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    known: Tensor | None,
    shape: Geometry,
    after: Epilogue,
    keep: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the results, and with ``keep`` the position of each maximum in its window (else the results again).

    ``x`` [clients x images, ...] and ``weight`` [clients, ...] are channels-last. ``known`` holds the
    statistics of `moments` for normalisation, or None.
    """
    clients, channels_out = weight.shape[:2]
    images = len(x) // clients
    size = (len(x), channels_out, shape.OH // after.pool, shape.OW // after.pool)
    last = torch.channels_last
    out = torch.empty(size, device=x.device, dtype=x.dtype, memory_format=last)
    which = (
        torch.empty(size, device=x.device, dtype=torch.uint8, memory_format=last) if keep else out
    )
    check_size(x, out)
    gather, windows = few(shape), images * size[2] * size[3]
    tile = _few_tile(shape) if gather else _tile(windows, channels_out, shape.CI, clients)
    grid = (triton.cdiv(windows, tile["BM"]), triton.cdiv(channels_out, tile["BN"]), clients)
    convolve[grid](
        x, weight, weight if bias is None else bias, weight if known is None else known, out, which,
        weight.stride(0), 0 if bias is None else bias.stride(0), images, *shape,
        POOL=after.pool, BIASED=bias is not None, NORMED=known is not None, RELU=after.relu,
        KEEP=keep, GATHER=gather, **tile,
    )  # fmt: skip
    return out, which


def _weight_room(
    shape: Geometry, clients: int, dtype: torch.dtype, device: torch.device, *parts: int
) -> Tensor:
    """Return an empty tensor for weights, channels-last; ``parts`` are leading dimensions of partial sums."""
    size = (*parts, clients, shape.CO, shape.KH, shape.KW, shape.CI)
    return torch.empty(size, dtype=dtype, device=device)


def _few_gradients(
    ctx: Any, x: Tensor, grad: Tensor, which: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of a small weight and of the bias, from partial sums over the pixels."""
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
        IMAGES=ctx.images, POOL=ctx.after.pool, RELU=ctx.after.relu, PARTS=parts,
        TURNS=triton.cdiv(blocks, parts), **tile,
    )  # fmt: skip
    of_bias = None if ctx.bias_dtype is None else added_up(sums, ctx.bias_dtype)
    return added_up(out, x.dtype).movedim(-1, 2), of_bias


def geometry(x: Tensor, weight: Tensor, padding: Sequence[int], stride: Sequence[int]) -> Geometry:
    """Return the sizes for images ``x`` and the clients' weights [clients, output, input, row, column]."""
    _, channels_out, channels, rows, columns = weight.shape
    height, width = x.shape[2:]
    (pad_h, pad_w), (down, right) = padding, stride
    return Geometry(
        H=height,
        W=width,
        OH=(height + 2 * pad_h - rows) // down + 1,
        OW=(width + 2 * pad_w - columns) // right + 1,
        CI=channels,
        CO=channels_out,
        KH=rows,
        KW=columns,
        PAD_H=pad_h,
        PAD_W=pad_w,
        DOWN=down,
        RIGHT=right,
    )


def fused_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: Sequence[int],
    stride: Sequence[int],
    after: Epilogue,
) -> Tensor:
    """Convolve every client's images with its own weights, in one launch; the result is channels-last.

    ``x`` [clients x images, channels, height, width], ``weight`` [clients, output, input, row, column],
    ``bias`` [clients, output] or None. ``after``: what is applied to the results.
    """
    keep = torch.is_grad_enabled() and (weight.requires_grad or x.requires_grad) and after.relu
    x, weight = _laid_out(x, weight)
    return _Conv.apply(x, weight, bias, geometry(x, weight, padding, stride), after, keep)


def normed_convolution(
    x: Tensor,
    weight: Tensor,
    known: Tensor,
    padding: Sequence[int],
    stride: Sequence[int],
    after: Epilogue,
) -> Tensor:
    """Convolve and normalise with the ``known`` statistics of `settled`; there is no backward pass.

    ``known`` [4, clients, channels]: mean, 1 / deviation, factor and offset.
    """
    x, weight = _laid_out(x, weight)
    return convolved(x, weight, None, known, geometry(x, weight, padding, stride), after)[0]


def _laid_out(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return both channels-last in memory, copied only if they are not.

    There may be gaps between the clients' weights, because a stack's copies lie apart.
    """
    x = x.contiguous(memory_format=torch.channels_last)
    own = weight.movedim(2, -1)
    return x, weight if own[0].is_contiguous() else own.contiguous().movedim(-1, 2)


def stacked_convolution(
    x: Tensor, weight: Tensor, bias: Tensor, padding: Sequence[int], pool: int
) -> Tensor:
    """Return `stacked_conv_relu_pool`; fastest with ``weight`` channels-last."""
    return fused_convolution(x, weight, bias, padding, (1, 1), Epilogue(relu=True, pool=pool))
