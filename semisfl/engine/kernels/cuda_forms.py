"""The CUDA form of every operation, by name. Imported only if Triton is installed.

Each form checks whether its kernel supports the input and calls the plain form if not. Which of two
kernels is faster was measured on an H200; the limits below are from there.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from semisfl.engine.kernels.by_row import WIDEST, fused_entropy, fused_unit
from semisfl.engine.kernels.clustering import fused_contrast
from semisfl.engine.kernels.convolution import (
    FEW,
    Epilogue,
    fused_convolution,
    normed_convolution,
    stacked_convolution,
)
from semisfl.engine.kernels.images import normalized_row
from semisfl.engine.kernels.linear import fused_linear
from semisfl.engine.kernels.normalisation import fused_norm, settled
from semisfl.engine.kernels.one_each import convolutions_in_turn
from semisfl.engine.kernels.plain import OPERATIONS
from semisfl.engine.kernels.pooling import bias_relu
from semisfl.engine.kernels.update import fused_ema, fused_sgd


def _plain(name: str, *arguments: Any) -> Tensor:
    """Call the plain form, for inputs that the fused form does not support."""
    out: Tensor = OPERATIONS[name](*arguments)
    return out


def _conv_relu_pool(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    pool: int,
) -> Tensor:
    """Use cuDNN's convolution, except for few input channels, which cuDNN pads to eight."""
    simple = all(value == 1 for value in (*stride, *dilation, groups)) and all(
        pad < size for pad, size in zip(padding, weight.shape[2:], strict=True)
    )
    if simple and x.dtype is torch.bfloat16 and weight[0].numel() <= FEW:
        weight = weight.to(x.dtype).contiguous(memory_format=torch.channels_last)
        return stacked_convolution(x, weight.unsqueeze(0), bias.unsqueeze(0), padding, pool)
    return bias_relu(F.conv2d(x, weight, None, stride, padding, dilation, groups), bias, pool)


# From this many tiles of 128 x 128 results on, one client fills a large GPU.
ENOUGH_TILES = 128
# Up to this many weight entries, saving a pass over memory pays for a slower convolution.
SHALLOW = 1152


def _usual(
    x: Tensor, weight: Tensor, padding: Sequence[int], dilation: Sequence[int], groups: int
) -> bool:
    """Return whether the fused convolution supports this."""
    inside = all(pad < size for pad, size in zip(padding, weight.shape[3:], strict=True))
    return x.dtype is torch.bfloat16 and inside and all(value == 1 for value in (*dilation, groups))


def _enough(x: Tensor, weight: Tensor, stride: Sequence[int]) -> bool:
    """Return whether cuDNN computes the clients in turn: each fills a large GPU, or there is only one."""
    clients, channels_out = weight.shape[:2]
    pixels = x.numel() // (clients * x.shape[1] * stride[0] * stride[1])
    fills = clients == 1 or pixels * channels_out >= ENOUGH_TILES * 128**2
    return fills and weight[0, 0].numel() > FEW


def _stacked_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Convolve all clients in one launch, or in turn by cuDNN if one client fills the GPU."""
    if not _usual(x, weight, padding, dilation, groups):
        return _plain("stacked_conv", x, weight, bias, stride, padding, dilation, groups)
    weight = weight.to(x.dtype)
    if bias is None and _enough(x, weight, stride):
        return convolutions_in_turn(x, weight, stride, padding)
    return fused_convolution(x, weight, bias, padding, stride, Epilogue())


def _conv_norm_relu_pool(
    x: Tensor,
    kernel: Tensor,
    shift: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *norm: Any,
) -> Tensor:
    """Convolve and normalise in one kernel where statistics are known and no gradient is asked for.

    Otherwise the convolution's results are written once and normalised by `fused_norm`. That is also faster
    for deep convolutions, which cuDNN computes best.
    """
    *rows, training, _, eps, relu, pool = norm
    followed = torch.is_grad_enabled() and any(t.requires_grad for t in (x, kernel, *rows))
    shallow = kernel[0, 0].numel() <= SHALLOW or not _enough(x, kernel, stride)
    if training or followed or not shallow or not _usual(x, kernel, padding, dilation, groups):
        out = _stacked_conv(x, kernel, None, stride, padding, dilation, groups)
        return fused_norm(out, shift, *norm)
    known = settled(x, x.new_empty(1), (shift, *rows), eps=eps)
    return normed_convolution(x, kernel.to(x.dtype), known, padding, stride, Epilogue(relu, pool))


def _linear_relu(x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
    """Compute in autocast's type; inputs of more than two dimensions take the plain form."""
    if x.dim() != 2 or not torch.is_autocast_enabled("cuda"):
        return _plain("linear_relu", x, weight, bias, relu)
    dtype = torch.get_autocast_dtype("cuda")
    return fused_linear(x.to(dtype), weight.to(dtype), bias.to(dtype), relu)


def _unit_rows(x: Tensor) -> Tensor:
    """Use the kernel for rows that one program can hold."""
    if x.shape[1] <= WIDEST:
        return fused_unit(x)
    return _plain("unit_rows", x)


def _cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Use the kernel for rows that one program can hold, unless the weights need a gradient."""
    weighted = weights is not None and weights.requires_grad
    if logits.shape[1] <= WIDEST and not weighted:
        return fused_entropy(logits, labels, weights)
    return _plain("cross_entropy", logits, labels, weights)


def _contrast(
    projections: Tensor,
    labels: Tensor,
    keys: Tensor,
    key_labels: Tensor,
    positive: Tensor,
    present: Tensor,
    temperature: float,
    mask: Tensor | None = None,
) -> Tensor:
    """Use the kernel unless single references are masked for single anchors."""
    references = keys, key_labels, positive, present
    if mask is None:
        return fused_contrast(projections, labels, references, temperature)
    return _plain("contrast", projections, labels, *references, temperature, mask)


def _ema_step(target: Tensor, source: Tensor, work: Tensor | None, decay: Tensor) -> None:
    """Move target and working copy in one pass; without a working copy the plain form is as fast."""
    if work is None:
        OPERATIONS["ema_step"](target, source, work, decay)
    else:
        fused_ema(target, source, work, decay)


FORMS: dict[str, Callable[..., Any]] = {
    "bias_relu_pool": bias_relu,
    "conv_relu_pool": _conv_relu_pool,
    "stacked_conv_relu_pool": stacked_convolution,
    "stacked_conv": _stacked_conv,
    "conv_norm_relu_pool": _conv_norm_relu_pool,
    "norm_relu_pool": fused_norm,
    "linear_relu": _linear_relu,
    "unit_rows": _unit_rows,
    "cross_entropy": _cross_entropy,
    "contrast": _contrast,
    "normalized_row": normalized_row,
    "sgd_step": fused_sgd,
    "ema_step": _ema_step,
}


def try_out() -> None:
    """Compile and run the smallest kernel, so that a machine without a working compiler fails early.

    Raises RuntimeError for a wrong result, and whatever Triton, the compiler or the driver raise.
    """
    target, source = torch.zeros(8, device="cuda"), torch.ones(8, device="cuda")
    work = torch.zeros(8, device="cuda", dtype=torch.bfloat16)
    fused_ema(target, source, work, torch.zeros((), device="cuda"))
    if not torch.equal(target, source):
        raise RuntimeError("a fused kernel gave a wrong result")
