# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-any-return"
"""A linear layer with ReLU; its backward pass computes mask and bias gradient in one pass.

PyTorch takes three: the mask, the masked gradient and its sum over rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from semisfl.engine.kernels.pooling import check_size

TILE = {"ROWS": 64, "COLUMNS": 32}


@triton.jit
def _back(
    grad, out, masked, sums, rows, columns,
    RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the upstream gradient where the ReLU is open, and its column sums, the gradient of the bias."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        there = (row < rows)[:, None] & (column < columns)[None, :]
        place = row[:, None] * columns + column[None, :]
        value = tl.load(grad + place, mask=there, other=0.0)
        if RELU:
            # Not "> 0": a NaN must not be hidden.
            is_closed = tl.load(out + place, mask=there, other=0.0) <= 0
            value = tl.where(is_closed, 0.0, value).to(masked.dtype.element_ty)
            tl.store(masked + place, value, mask=there)
        total += tl.sum(value.to(tl.float32), axis=0)
    tl.store(sums + column, total.to(sums.dtype.element_ty), mask=column < columns)


class _Linear(torch.autograd.Function):
    """relu(x weight^T + bias). The backward pass needs the result only to see where the ReLU is closed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
        """Return relu(x W^T + b), or without ReLU, for rows ``x`` [rows, inputs]."""
        out = torch.addmm(bias, x, weight.t())
        if relu:
            out.relu_()
        ctx.save_for_backward(x, weight, *([out] if relu else []))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``x``, weight and bias."""
        x, weight, *out = ctx.saved_tensors
        grad = grad.contiguous()
        check_size(grad)
        rows, columns = grad.shape
        of_bias = weight.new_empty(columns)
        masked = torch.empty_like(grad) if out else grad
        _back[(triton.cdiv(columns, TILE["COLUMNS"]),)](
            grad, out[0] if out else grad, masked, of_bias, rows, columns, RELU=bool(out), **TILE
        )
        of_x = masked @ weight if ctx.needs_input_grad[0] else None
        return of_x, masked.t() @ x, of_bias, None


def fused_linear(x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
    """Return `linear_relu` of rows ``x`` [rows, inputs] with ``weight`` [outputs, inputs]; all have one type."""
    return _Linear.apply(x, weight, bias, relu)
