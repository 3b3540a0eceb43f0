"""Send a split round's plan from rank 0 to the others."""

from collections.abc import Mapping, Sequence
from typing import Any

from semisfl.fleet.base import SplitRound
from semisfl.fleet.cluster.ranks import Ranks
from semisfl.fleet.packing import outline, pack, room_for, unpack

Block = tuple[int, ...]
"""The active clients of one rank."""


def blocks_of(active: Sequence[int], ranks: int) -> list[Block]:
    """Return equal shares, in order. If they cannot be equal, rank 0 has fewer: it is the server too."""
    least, more = divmod(len(active), ranks)
    sizes = [least + (rank >= ranks - more) for rank in range(ranks)]
    ends = [sum(sizes[: rank + 1]) for rank in range(ranks)]
    return [tuple(active[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def send_plan(ranks: Ranks, plan: SplitRound, blocks: Sequence[Block]) -> None:
    """Send the plan and both bottoms from rank 0 to the others."""
    ranks.send_command(
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


def receive_plan(ranks: Ranks, message: Mapping[str, Any]) -> SplitRound:
    """Receive the plan and return it for this rank's clients."""
    outlines = [message["outline"], message["outline"]]
    room = room_for(outlines, ranks.device)
    ranks.broadcast(room)
    bottom, teacher = unpack(outlines, room)
    alone = message["teacher_for"]
    return SplitRound(
        message["index"],
        tuple(message["blocks"][ranks.rank]),
        message["steps"],
        message["lr"],
        bottom,
        teacher,
        teacher_for=None if alone is None else frozenset(alone),
        teacher_decay=message["teacher_decay"],
        next_active=tuple(message["next_blocks"][ranks.rank]),
    )
