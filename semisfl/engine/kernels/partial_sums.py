# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""Add up partial sums of several programs. PyTorch's own sum is slow for few results."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# How many programs compute parts of one sum.
MOST_PARTS = 128
TILE = {"ROWS": 32, "COLUMNS": 64}


@triton.jit
def _add_up(parts, out, count, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write the sums of columns of ``parts`` [count, size]."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)
        there = (row < count)[:, None] & (column < size)[None, :]
        place = row.to(tl.int64)[:, None] * size + column[None, :]
        total += tl.sum(tl.load(parts + place, mask=there, other=0.0), axis=0)
    tl.store(out + column, total.to(out.dtype.element_ty), mask=column < size)


def added_up(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``parts.sum(0)`` computed in float32 and rounded once."""
    out = torch.empty(parts.shape[1:], device=parts.device, dtype=dtype)
    size = out.numel()
    _add_up[(triton.cdiv(size, TILE["COLUMNS"]),)](parts, out, len(parts), size, **TILE)
    return out
