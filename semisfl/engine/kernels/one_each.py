# mypy: disable-error-code="no-any-return"
"""Convolutions of several clients by cuDNN in turn, with their results side by side in memory.

This is fastest if the images of one client fill a large GPU. cuDNN writes into the tensor that the
next operation reads for all clients, so that no copy is needed.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _Each(torch.autograd.Function):
    """Convolutions in turn; both gradients are cuDNN's, client by client."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]
    ) -> Tensor:
        """Return each client's convolution of its share of the images with its own weights."""
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding = stride, padding
        return _convolved(x, weight, stride, padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of images and weights, client by client."""
        x, weight = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        of_input = None
        if ctx.needs_input_grad[0]:
            of_input = _to_input(grad, weight, x, ctx.stride, ctx.padding)
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = torch.stack(
                [
                    _gradient(*each, ctx.stride, ctx.padding, of_weight=True)
                    for each in _shares(grad, x, weight)
                ]
            )
        return of_input, of_weight, None, None


def _shares(grad: Tensor, x: Tensor, weight: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return gradient, images and weight of each client."""
    clients = len(weight)
    return list(zip(grad.chunk(clients), x.chunk(clients), weight, strict=True))


def _convolved(x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    """Return the convolutions of all clients in one tensor, into which cuDNN writes directly."""
    sides = [
        (size + 2 * pad - kernel) // step + 1
        for size, pad, kernel, step in zip(
            x.shape[2:], padding, weight.shape[3:], stride, strict=True
        )
    ]
    out = torch.empty(
        (len(x), weight.shape[1], *sides),
        device=x.device,
        dtype=x.dtype,
        memory_format=torch.channels_last,
    )
    backend = torch.backends.cudnn
    how = (backend.benchmark, backend.deterministic, backend.allow_tf32)
    for rows, own, target in zip(x.chunk(len(weight)), weight, out.chunk(len(weight)), strict=True):
        torch.ops.aten.cudnn_convolution.out(
            rows, own, padding, stride, (1, 1), 1, *how, out=target
        )
    return out


def _to_input(
    grad: Tensor, weight: Tensor, x: Tensor, stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """Compute the gradient of the images; with stride 1 as a convolution, which can write into a shared result."""
    rest = [kernel - 1 - pad for kernel, pad in zip(weight.shape[3:], padding, strict=True)]
    if tuple(stride) == (1, 1) and min(rest) >= 0:
        turned = weight.permute(0, 2, 3, 4, 1).flip(2, 3).contiguous().movedim(-1, 2)
        return _convolved(grad, turned, stride, rest)
    return torch.cat(
        [_gradient(*each, stride, padding, of_weight=False) for each in _shares(grad, x, weight)]
    )


def _gradient(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    of_weight: bool,
) -> Tensor:
    """Return cuDNN's gradient of the weight or of the images, for one client."""
    both = torch.ops.aten.convolution_backward.default(
        grad, x, weight, None, stride, padding, (1, 1), False, (0, 0), 1,
        (not of_weight, of_weight, False),
    )  # fmt: skip
    return both[int(of_weight)]


def convolutions_in_turn(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """Return conv2d of every client's share of ``x`` [rows, ...] with its ``weight`` [clients, ...]."""
    x = x.contiguous(memory_format=torch.channels_last)
    return _Each.apply(x, weight, tuple(stride), tuple(padding))
