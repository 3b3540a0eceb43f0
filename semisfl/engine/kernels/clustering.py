# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""Compute the contrastive loss and its gradient, one program per row of similarities.

The matrix [anchors, references] is written once by a matrix product, read twice by the kernel and
overwritten with its own gradient. So the loss needs no further memory for its backward pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _references(
    similarity, labels, positive, present, label, sharpness, columns, COUNT: tl.constexpr
):
    """Return a stretch of similarities divided by the temperature, and two masks of it.

    The masks: references that are present, and those of them that are positives of the row's ``label``.
    """
    inside = columns < COUNT
    there = tl.load(present + columns, mask=inside, other=0) != 0
    value = tl.load(similarity + columns, mask=inside, other=0.0) * sharpness
    same = (tl.load(labels + columns, mask=inside, other=-1) == label) & there
    same = same & (tl.load(positive + columns, mask=inside, other=0) != 0)
    # A large finite number: an anchor whose references are all absent must not give NaN.
    return tl.where(there, value, -1e9), there, same


@triton.jit
def _contrast(
    similarity, labels, keys_labels, positive, present, losses, rows, sharpness,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Overwrite a row of similarities with the gradient of the mean loss with respect to them.

    The first pass over the row finds its largest value, the sum of exponentials (both updated together,
    so that nothing overflows) and the positives; the second pass writes the gradient.
    """
    row = tl.program_id(0)
    similarity += row.to(tl.int64) * COUNT
    label = tl.load(labels + row)
    highest = tl.full([BLOCK], -1e9, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    pulled = tl.zeros([BLOCK], tl.float32)
    positives = tl.zeros([BLOCK], tl.float32)
    for start in range(0, COUNT, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        value, there, same = _references(
            similarity, keys_labels, positive, present, label, sharpness, columns, COUNT
        )
        higher = tl.maximum(highest, value)
        total = total * tl.exp(highest - higher) + tl.where(there, tl.exp(value - higher), 0.0)
        highest = higher
        pulled += tl.where(same, value, 0.0)
        positives += same.to(tl.float32)
    top = tl.max(highest, axis=0)
    log_sum = tl.log(tl.sum(total * tl.exp(highest - top), axis=0)) + top
    matches = tl.sum(positives, axis=0)
    share = 1 / tl.maximum(matches, 1.0)
    # An anchor without positives contributes nothing, whatever its references are.
    loss = tl.where(matches > 0, (matches * log_sum - tl.sum(pulled, axis=0)) * share, 0.0)
    tl.store(losses + row, loss / rows)
    weight = tl.where(matches > 0, sharpness / rows, 0.0)
    for start in range(0, COUNT, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        value, there, same = _references(
            similarity, keys_labels, positive, present, label, sharpness, columns, COUNT
        )
        gradient = tl.where(there, tl.exp(value - log_sum), 0.0) - tl.where(same, share, 0.0)
        gradient = tl.where(matches > 0, weight * gradient, 0.0)
        tl.store(similarity + columns, gradient, mask=columns < COUNT)


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """Allow TF32 in products of float32 inside the context."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = before or allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class _Contrast(torch.autograd.Function):
    """The contrastive loss; keys, labels and masks receive no gradient."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(
        ctx: Any,
        projections: Tensor,
        labels: Tensor,
        keys: Tensor,
        keys_labels: Tensor,
        positive: Tensor,
        present: Tensor,
        temperature: float,
        rounded: bool,
    ) -> Tensor:
        """Return the mean loss; the similarities [rows, keys] are overwritten with the loss's gradients."""
        with _tf32(rounded):
            gradients = projections @ keys.T
        rows, count = gradients.shape
        losses = torch.empty(rows, device=gradients.device)
        _contrast[(rows,)](
            gradients, labels, keys_labels, positive, present, losses, rows, 1 / temperature,
            COUNT=count, BLOCK=BLOCK,
        )  # fmt: skip
        ctx.save_for_backward(gradients, keys)
        ctx.rounded = rounded
        return losses.sum()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the projections [rows, width]."""
        gradients, keys = ctx.saved_tensors
        with _tf32(ctx.rounded):
            return gradients @ keys * grad, None, None, None, None, None, None, None


def fused_contrast(
    projections: Tensor, labels: Tensor, references: tuple[Tensor, ...], temperature: float
) -> Tensor:
    """Return `contrast` without a mask.

    ``references`` are keys, their labels, which may be positives and which are present. Unit vectors that
    come from bf16 layers hold no more than TF32 keeps, so they are multiplied in TF32.
    """
    rounded = torch.is_autocast_enabled("cuda")
    return _Contrast.apply(projections, labels, *references, temperature, rounded)
