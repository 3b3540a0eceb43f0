# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""SGD step or moving average of a whole model and its working copy, in one pass over memory.

Weights, momentum, working copy and the teacher's values are read and written once per step; as separate
operations they would be read several times.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _sgd(
    master, work, momentum, gradient, lr, size, stride, weight_decay, factor,
    teacher, teacher_work, ema_decay, scale, base, l2, l1,
    NESTEROV: tl.constexpr, FOLLOWED: tl.constexpr, SCALED: tl.constexpr, ADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Step a block of one row: momentum, weight, working copy and, if it follows, the teacher.

    ``gradient`` is stored without gaps; all other tensors have rows of ``stride`` values.
    """
    row = tl.program_id(1).to(tl.int64)
    inside_row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = inside_row < size
    offsets = row * stride + inside_row
    weight = tl.load(master + offsets, mask=inside)
    descent = tl.load(gradient + row * size + inside_row, mask=inside).to(tl.float32)
    if SCALED:
        descent *= tl.load(scale)
    descent += weight_decay * weight
    if ADDED:
        below = tl.load(base + offsets, mask=inside)
        sign = tl.where(weight > 0, 1.0, tl.where(weight < 0, -1.0, 0.0))
        descent += 2 * l2 * (weight - below) + l1 * sign
    buffer = factor * tl.load(momentum + offsets, mask=inside) + descent
    change = descent + factor * buffer if NESTEROV else buffer
    weight -= tl.load(lr) * change
    tl.store(momentum + offsets, buffer, mask=inside)
    tl.store(master + offsets, weight, mask=inside)
    computed = weight + below if ADDED else weight
    tl.store(work + offsets, computed.to(work.dtype.element_ty), mask=inside)
    if FOLLOWED:
        mine = tl.load(teacher + offsets, mask=inside)
        mine += (weight - mine) * (1 - tl.load(ema_decay))
        tl.store(teacher + offsets, mine, mask=inside)
        tl.store(teacher_work + offsets, mine.to(work.dtype.element_ty), mask=inside)


def fused_sgd(
    master: Tensor,
    work: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    lr: Tensor,
    weight_decay: float,
    momentum_factor: float,
    nesterov: bool,
    teacher: Tensor | None = None,
    teacher_work: Tensor | None = None,
    ema_decay: Tensor | None = None,
    scale: Tensor | None = None,
    base: Tensor | None = None,
    l2: float = 0.0,
    l1: float = 0.0,
) -> None:
    """Take the step of `sgd_step` in one pass; the kernel does not read arguments that are absent.

    ``master``, ``work``, ``momentum`` [rows, size] may have gaps between rows; ``gradient`` has none.
    """
    rows, size = master.shape
    followed = teacher is not None
    _sgd[(triton.cdiv(size, BLOCK), rows)](
        master, work, momentum, gradient, lr, size, master.stride(0),
        weight_decay, momentum_factor,
        *((teacher, teacher_work, ema_decay) if followed else (master, work, lr)),
        lr if scale is None else scale, master if base is None else base, l2, l1,
        NESTEROV=nesterov, FOLLOWED=followed, SCALED=scale is not None, ADDED=base is not None,
        BLOCK=BLOCK,
    )  # fmt: skip


@triton.jit
def _ema(target, source, work, decay, total, copied, BLOCK: tl.constexpr):
    """Move a block of the target, and its working copy where there is one (the first ``copied`` values)."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < total
    mine = tl.load(target + offsets, mask=inside)
    mine += (tl.load(source + offsets, mask=inside) - mine) * (1 - tl.load(decay))
    tl.store(target + offsets, mine, mask=inside)
    tl.store(work + offsets, mine.to(work.dtype.element_ty), mask=offsets < copied)


def fused_ema(target: Tensor, source: Tensor, work: Tensor, decay: Tensor) -> None:
    """Set target <- decay target + (1 - decay) source, and round it to ``work``, in one pass."""
    total = target.numel()
    _ema[(triton.cdiv(total, BLOCK),)](
        target, source, work, decay, total, work.numel(), BLOCK=BLOCK
    )
