# mypy: disable-error-code="untyped-decorator, no-any-return"
"""BatchNorm, ReLU and 2 x 2 pooling of several clients, each with its own statistics.

PyTorch needs one launch per client and layer, and more than twice as many passes over memory. On an
H200, bias, BatchNorm, ReLU and pooling took more than half of VGG's time.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from semisfl.engine.kernels.moments import (
    moments,
    normalise,
    reduce,
    settle,
    settle_back,
    to_raw,
)
from semisfl.engine.kernels.pooling import check_size

# Values per tile; programs that share a sum over pixels; parts that are added at a time.
TILE = 2048
PROGRAMS = 1056
MOST_PARTS = 256
ROWS = 32


class Places(NamedTuple):
    """The memory layout of the images, as a launch needs it: ``images`` per client, ``pool`` 1 or 2."""

    clients: int
    images: int
    channels: int
    height: int
    width: int
    pool: int

    @property
    def pooled(self) -> tuple[int, int]:
        """Return the pooled width and height."""
        return self.width // self.pool, self.height // self.pool

    @property
    def tile(self) -> dict[str, int]:
        """Return the tile of a program: `TILE` values, as many channels as there are, up to 128."""
        channels = min(128, triton.next_power_of_2(self.channels))
        return {"PIXELS": TILE // channels, "CHANNELS": channels, "num_warps": 4}

    def grid(self, windows: int) -> tuple[int, int, int]:
        """Return a launch with one program per tile of ``windows`` x channels, per client."""
        tile = self.tile
        return (
            triton.cdiv(windows, tile["PIXELS"]),
            triton.cdiv(self.channels, tile["CHANNELS"]),
            self.clients,
        )

    def shared(self, windows: int) -> tuple[tuple[int, int, int], dict[str, int]]:
        """Return a launch whose programs compute several tiles in turn, each a part of a sum."""
        blocks, across, clients = self.grid(windows)
        parts = min(blocks, MOST_PARTS, max(1, PROGRAMS // (across * clients)))
        return (parts, across, clients), {"parts": parts, "turns": triton.cdiv(blocks, parts)}


NormRows = tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor]
"""BatchNorm's tensors [clients, channels]: the preceding convolution's bias, weight, bias, running mean and variance."""


def settled(
    x: Tensor,
    sums: Tensor,
    rows: NormRows,
    count: int = 1,
    momentum: float = 0.0,
    eps: float = 1e-5,
    training: bool = False,
) -> Tensor:
    """Return the statistics [4, clients, channels]: mean, 1 / deviation, factor and offset of every channel.

    In training they come from ``sums``, the partial moments over ``count`` pixels, and the running
    statistics in ``rows`` move; else they come from the running statistics. With ``momentum`` 0 none move.
    """
    clients, channels = rows[1].shape
    known = torch.empty((4, clients, channels), device=x.device)
    tensors = [rows[1] if row is None else row for row in rows]
    across = min(128, triton.next_power_of_2(channels))
    settle[(1, triton.cdiv(channels, across), clients)](
        x, sums, *tensors, known, *(row.stride(0) for row in tensors), count, channels, len(sums),
        momentum, eps, TRAINING=training, SHIFTED=rows[0] is not None, ROWS=ROWS, CHANNELS=across,
    )  # fmt: skip
    return known


class _Norm(torch.autograd.Function):
    """BatchNorm, ReLU and pooling of several clients.

    Forward: partial moments (in training), statistics, then one pass that writes the pooled result.
    Backward: two partial sums, the gradients of weight and bias, then one pass for the input's gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shift: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        running: tuple[Tensor, Tensor],
        how: tuple[bool, float, float, bool, int],
    ) -> Tensor:
        """Return max_pool(relu(norm(x))) and keep the batch's mean and deviation."""
        training, momentum, eps, relu, pool = how
        clients, channels = weight.shape
        height, width = (*x.shape[2:], 1, 1)[:2]
        places = Places(clients, len(x) // clients, channels, height, width, pool)
        count = places.images * height * width
        across, down = places.pooled
        windows = places.images * across * down
        grid, parts = places.shared(count)
        sums = x.new_empty((parts["parts"], clients, 2, channels), dtype=torch.float32)
        if training:
            moments[grid](x, sums, count, channels, **parts, **places.tile)
        rows = (shift, weight, bias, *running)
        known = settled(x, sums, rows, count, momentum, eps, training)
        out = _empty(x, (len(x), channels, down, across))
        normalise[places.grid(windows)](
            x, known, out, windows, channels, across, down, width, height,
            RELU=relu, POOL=pool, **places.tile,
        )  # fmt: skip
        ctx.save_for_backward(x, known, shift)
        ctx.places, ctx.training, ctx.relu = places, training, relu
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients; which values pooling and ReLU chose is computed again."""
        x, known, shift = ctx.saved_tensors
        places: Places = ctx.places
        clients, images, channels, height, width, pool = places
        across, down = places.pooled
        windows, count = images * across * down, images * height * width
        grad = _as_it_lies(grad)
        grid, parts = places.shared(windows)
        sums = x.new_empty((parts["parts"], clients, 2, channels), dtype=torch.float32)
        reduce[grid](
            x, grad, known, sums, windows, channels, across, down, width, height,
            RELU=ctx.relu, POOL=pool, **parts, **places.tile,
        )  # fmt: skip
        of_weight, of_bias = sums.new_empty(2, clients, channels)
        coefficients = torch.empty_like(known[:2])
        once = (1, *places.grid(1)[1:])
        settle_back[once](
            sums, known, of_weight, of_bias, coefficients, count, channels, len(sums),
            TRAINING=ctx.training, ROWS=ROWS, CHANNELS=places.tile["CHANNELS"],
        )  # fmt: skip
        of_x = None
        if ctx.needs_input_grad[0]:
            full_across, full_down = triton.cdiv(width, pool), triton.cdiv(height, pool)
            full = images * full_across * full_down
            of_x = torch.empty_like(x)
            to_raw[places.grid(full)](
                x, grad, known, coefficients, of_x, full, channels, across, down, width, height,
                full_across, full_down,
                RELU=ctx.relu, POOL=pool, TRAINING=ctx.training, **places.tile,
            )  # fmt: skip
        of_shift = None
        if shift is not None:
            # A constant added to a channel is removed again with its mean, so its gradient is zero.
            of_shift = torch.zeros_like(shift) if ctx.training else (of_bias * known[2])
            of_shift = of_shift.to(shift.dtype)
        return of_x, of_shift, of_weight, of_bias, None, None


def _as_it_lies(x: Tensor) -> Tensor:
    """Return the tensor channels-last if it has pixels."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x.contiguous()


def _empty(x: Tensor, size: tuple[int, ...]) -> Tensor:
    """Return room for results of this size: rows, or channels-last images."""
    if x.dim() == 2:
        return x.new_empty(size[:2])
    return torch.empty(size, device=x.device, dtype=x.dtype, memory_format=torch.channels_last)


def fused_norm(
    x: Tensor,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
    relu: bool,
    pool: int,
) -> Tensor:
    """Return `norm_relu_pool` of ``x`` on a GPU; images given and returned lie channels-last.

    ``x`` [clients x images, channels, ...]; ``shift``, ``weight``, ``bias`` and the running statistics
    [clients, channels]. Raises ValueError if a client has a single value per channel in training.
    """
    check_size(x)
    if x.dim() == 3:
        wide = fused_norm(
            x.unsqueeze(-1), shift, weight, bias, running_mean, running_var,
            training, momentum, eps, relu, pool,
        )  # fmt: skip
        return wide.squeeze(-1)
    x = _as_it_lies(x)
    if training and x.numel() == x.shape[1] * len(weight):
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {x.shape} of "
            f"{len(weight)} clients; set clients.batch higher"
        )
    return _Norm.apply(
        x, shift, weight, bias, (running_mean, running_var), (training, momentum, eps, relu, pool)
    )
