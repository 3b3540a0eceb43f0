"""The CUDA form of every operation, by name. Imported only where Triton is."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from semisfl.engine.kernels.clustering import fused_contrast
from semisfl.engine.kernels.convolution import FEW, stacked_convolution
from semisfl.engine.kernels.images import normalized_row
from semisfl.engine.kernels.normalisation import fused_norm
from semisfl.engine.kernels.plain import OPERATIONS
from semisfl.engine.kernels.pooling import bias_relu
from semisfl.engine.kernels.update import fused_ema, fused_sgd


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
    """The convolution is cuDNN's, but for few input channels, which it pads to eight."""
    simple = all(value == 1 for value in (*stride, *dilation, groups)) and all(
        pad < size for pad, size in zip(padding, weight.shape[2:], strict=True)
    )
    if simple and x.dtype is torch.bfloat16 and weight[0].numel() <= FEW:
        weight = weight.to(x.dtype).contiguous(memory_format=torch.channels_last)
        return stacked_convolution(x, weight.unsqueeze(0), bias.unsqueeze(0), padding, pool)
    return bias_relu(F.conv2d(x, weight, None, stride, padding, dilation, groups), bias, pool)


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
    references = keys, key_labels, positive, present
    if mask is None:
        return fused_contrast(projections, labels, references, temperature)
    plain: Tensor = OPERATIONS["contrast"](projections, labels, *references, temperature, mask)
    return plain


def _ema_step(target: Tensor, source: Tensor, work: Tensor | None, decay: Tensor) -> None:
    if work is None:
        OPERATIONS["ema_step"](target, source, work, decay)
    else:
        fused_ema(target, source, work, decay)


FORMS: dict[str, Callable[..., Any]] = {
    "bias_relu_pool": bias_relu,
    "conv_relu_pool": _conv_relu_pool,
    "stacked_conv_relu_pool": stacked_convolution,
    "norm_relu_pool": fused_norm,
    "contrast": _contrast,
    "normalized_row": normalized_row,
    "sgd_step": fused_sgd,
    "ema_step": _ema_step,
}


def try_out() -> None:
    """Compile and run the smallest kernel, so that a machine on which that fails is known early."""
    target, source = torch.zeros(8, device="cuda"), torch.ones(8, device="cuda")
    work = torch.zeros(8, device="cuda", dtype=torch.bfloat16)
    fused_ema(target, source, work, torch.zeros((), device="cuda"))
    if not torch.equal(target, source):
        raise RuntimeError("a fused kernel gave a wrong result")
