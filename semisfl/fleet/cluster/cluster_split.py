"""A split round's plan on its way from rank 0 to the others."""

from collections.abc import Mapping, Sequence
from typing import Any

from semisfl.fleet.base import SplitRound
from semisfl.fleet.cluster.ranks import Ranks
from semisfl.fleet.packing import outline, pack, room_for, unpack

Block = tuple[int, ...]
"""The active clients of one rank."""


def blocks_of(active: Sequence[int], ranks: int) -> list[Block]:
    """Equal shares, in order; where they cannot be, rank 0, which is the server too, has less."""
    least, more = divmod(len(active), ranks)
    sizes = [least + (rank >= ranks - more) for rank in range(ranks)]
    ends = [sum(sizes[: rank + 1]) for rank in range(ranks)]
    return [tuple(active[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def tell(ranks: Ranks, plan: SplitRound, blocks: Sequence[Block]) -> None:
    ranks.say(
        "split",
        index=plan.index,
        blocks=blocks,
        next_blocks=blocks_of(plan.next_active, ranks.count),
        steps=plan.steps,
        lr=float(plan.lr),
        teacher_for=None if plan.teacher_for is None else sorted(plan.teacher_for),
        teacher_decay=plan.teacher_decay,
        outline=outline(plan.bottom),
    )
    ranks.broadcast(pack([plan.bottom, plan.teacher_bottom]))


def hear(ranks: Ranks, said: Mapping[str, Any]) -> SplitRound:
    """The plan for this rank's clients."""
    outlines = [said["outline"], said["outline"]]
    room = room_for(outlines, ranks.device)
    ranks.broadcast(room)
    bottom, teacher = unpack(outlines, room)
    alone = said["teacher_for"]
    return SplitRound(
        said["index"],
        tuple(said["blocks"][ranks.rank]),
        said["steps"],
        said["lr"],
        bottom,
        teacher,
        teacher_for=None if alone is None else frozenset(alone),
        teacher_decay=said["teacher_decay"],
        next_active=tuple(said["next_blocks"][ranks.rank]),
    )
