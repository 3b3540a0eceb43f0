# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""One pass over memory for a step, or a moving average, of a whole model and its working copy."""

import triton
import triton.language as tl
from torch import Tensor

from semisfl.config import OptimizerConfig

BLOCK = 1024


@triton.jit
def _sgd(
    master, work, momentum, gradient, lr, size, apart, decay, mu, teacher, teacher_work, keep,
    NESTEROV: tl.constexpr, FOLLOWED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, inside_row = tl.program_id(1), tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = inside_row < size
    offsets = row * apart + inside_row
    weight = tl.load(master + offsets, mask=inside)
    slope = tl.load(gradient + row * size + inside_row, mask=inside).to(tl.float32)
    slope += decay * weight
    speed = mu * tl.load(momentum + offsets, mask=inside) + slope
    change = slope + mu * speed if NESTEROV else speed
    weight -= tl.load(lr) * change
    tl.store(momentum + offsets, speed, mask=inside)
    tl.store(master + offsets, weight, mask=inside)
    tl.store(work + offsets, weight.to(work.dtype.element_ty), mask=inside)
    if FOLLOWED:
        mine = tl.load(teacher + offsets, mask=inside)
        mine += (weight - mine) * (1 - tl.load(keep))
        tl.store(teacher + offsets, mine, mask=inside)
        tl.store(teacher_work + offsets, mine.to(work.dtype.element_ty), mask=inside)


def sgd(
    master: Tensor,
    work: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    lr: Tensor,
    config: OptimizerConfig,
    teacher: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    """One SGD step of full-precision weights [rows, size]; ``work`` is their copy in another type.

    The rows of the three lie equally far apart, those of ``gradient`` one after the other.
    ``teacher``: weights laid out alike that follow, their working copy, and how much they keep.
    """
    rows, size = master.shape
    _sgd[(triton.cdiv(size, BLOCK), rows)](
        master, work, momentum, gradient, lr, size, master.stride(0),
        config.weight_decay, config.momentum, *(teacher or (master, work, lr)),
        NESTEROV=config.nesterov, FOLLOWED=teacher is not None, BLOCK=BLOCK,
    )  # fmt: skip


@triton.jit
def _follow(target, source, work, keep, total, copied, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < total
    mine = tl.load(target + offsets, mask=inside)
    mine += (tl.load(source + offsets, mask=inside) - mine) * (1 - tl.load(keep))
    tl.store(target + offsets, mine, mask=inside)
    tl.store(work + offsets, mine.to(work.dtype.element_ty), mask=offsets < copied)


def follow(target: Tensor, source: Tensor, work: Tensor, keep: Tensor) -> None:
    """target <- keep target + (1 - keep) source; ``work`` copies the head of ``target``."""
    total = target.numel()
    _follow[(triton.cdiv(total, BLOCK),)](
        target, source, work, keep, total, work.numel(), BLOCK=BLOCK
    )
