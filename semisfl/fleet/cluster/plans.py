"""Send a round's plan from rank 0 to the other ranks, and the results of a full-model round back.

States are sent once per rank that needs them, however many of its clients share them. What a client
asks for during the round is sent along, and counted only if it was asked for.

A message in JSON comes first. It names the round's settings and, for each state, its outline; the
values follow as flat tensors, one per dtype.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from semisfl.fleet.base import ClientResult, ClientWork, FullRound, SplitRound, State
from semisfl.fleet.byte_counts import Traffic
from semisfl.fleet.cluster.ranks import Ranks
from semisfl.fleet.packing import outline, pack, room_for, unpack

Block = tuple[int, ...]
"""The active clients of one rank."""


def blocks_of(active: Sequence[int], ranks: int) -> list[Block]:
    """Return each rank's block of the ``active`` clients: equal shares, in order.

    If they cannot be equal, rank 0 has fewer: it is the server too.
    """
    least, more = divmod(len(active), ranks)
    sizes = [least + (rank >= ranks - more) for rank in range(ranks)]
    ends = [sum(sizes[: rank + 1]) for rank in range(ranks)]
    return [tuple(active[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def send_split(ranks: Ranks, plan: SplitRound, blocks: Sequence[Block]) -> None:
    """Send a split round's plan, each rank's block of clients and both bottoms from rank 0 to the others."""
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


def receive_split(ranks: Ranks, message: Mapping[str, Any]) -> SplitRound:
    """Receive a split round from rank 0 and return it for this rank's clients."""
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


class _States:
    """The states of a round, each numbered once however often it is used, with their outlines."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self.states: list[State] = []
        self.outlines: list[Any] = []
        self.outline_of: list[int] = []

    def number(self, state: State) -> int:
        """Return the number of a state; the same object has the same number."""
        if id(state) not in self._numbers:
            self._numbers[id(state)] = len(self.states)
            self.states.append(state)
            shape = outline(state)
            if shape not in self.outlines:
                self.outlines.append(shape)
            self.outline_of.append(self.outlines.index(shape))
        return self._numbers[id(state)]

    def numbers(self, states: Mapping[str, State]) -> dict[str, int]:
        """Return the numbers of several states by name."""
        return {name: self.number(state) for name, state in states.items()}


def send_full(ranks: Ranks, work: ClientWork, plan: FullRound, blocks: Sequence[Block]) -> None:
    """Send a full-model round from rank 0 to the others.

    States that every client gets are broadcast. A state for single clients goes only to their ranks.
    """
    known = _States()
    shared = {
        "send": known.numbers(plan.send),
        "on_request": known.numbers(plan.on_request),
    }
    for_all = len(known.states)
    single = {
        which: [
            [client, known.numbers(states[client])]
            for block in blocks[1:]
            for client in block
            if client in states
        ]
        for which, states in (("send_to", plan.send_to), ("held", plan.held))
    }
    ranks.send_command(
        "train",
        work=work.name,
        index=plan.index,
        blocks=blocks,
        steps=plan.steps,
        lr=float(plan.lr),
        kinds=dict(plan.kinds),
        settings=dict(plan.settings),
        outlines=known.outlines,
        outline_of=known.outline_of,
        for_all=for_all,
        **shared,
        **single,
    )
    ranks.broadcast(pack(known.states[:for_all]))
    ranks.send(
        {
            rank: pack([known.states[number] for number in _needed(single, blocks[rank], for_all)])
            for rank in ranks.others
        }
    ).wait()


def _needed(single: Mapping[str, Any], block: Block, for_all: int) -> list[int]:
    """Return the numbers, sorted, of the states that are sent to single clients of ``block`` alone."""
    numbers = {
        number
        for entries in single.values()
        for client, states in entries
        if client in block
        for number in states.values()
        if number >= for_all
    }
    return sorted(numbers)


def receive_full(ranks: Ranks, message: Mapping[str, Any]) -> FullRound:
    """Receive a full-model round from rank 0 and return it for this rank's clients."""
    outlines = [message["outlines"][number] for number in message["outline_of"]]
    block: Block = tuple(message["blocks"][ranks.rank])
    shared, for_all = outlines[: message["for_all"]], message["for_all"]
    room = room_for(shared, ranks.device)
    ranks.broadcast(room)
    states = dict(enumerate(unpack(shared, room)))
    needed = _needed({key: message[key] for key in ("send_to", "held")}, block, for_all)
    own = [outlines[number] for number in needed]
    room = room_for(own, ranks.device)
    ranks.receive({0: room}).wait()
    states |= dict(zip(needed, unpack(own, room), strict=True))

    def named(numbers: Mapping[str, int]) -> dict[str, State]:
        return {name: states[number] for name, number in numbers.items()}

    def of_clients(entries: Sequence[tuple[int, Mapping[str, int]]]) -> dict[int, dict[str, State]]:
        return {client: named(numbers) for client, numbers in entries if client in block}

    return FullRound(
        message["index"],
        block,
        message["steps"],
        message["lr"],
        send=named(message["send"]),
        kinds=message["kinds"],
        on_request=named(message["on_request"]),
        send_to=of_clients(message["send_to"]),
        held=of_clients(message["held"]),
        settings=message["settings"],
    )


def send_results(ranks: Ranks, results: Sequence[ClientResult], traffic: Mapping[str, int]) -> None:
    """Send this rank's results and its byte counts ``traffic`` to rank 0."""
    known = _States()
    answers = [
        [result.client, dict(result.numbers), known.numbers(result.states)] for result in results
    ]
    ranks.reply(
        results=answers,
        traffic=traffic,
        outlines=known.outlines,
        outline_of=known.outline_of,
    )
    ranks.send({0: pack(known.states)}).wait()


def receive_results(ranks: Ranks, rank: int, traffic: Traffic) -> list[ClientResult] | None:
    """Receive the results of ``rank`` and count their bytes in ``traffic``; return None if it was stopped."""
    message = ranks.reply_of(rank)
    if "stopped" in message:
        return None
    outlines = [message["outlines"][number] for number in message["outline_of"]]
    room = room_for(outlines, ranks.device)
    ranks.receive({rank: room}).wait()
    states = unpack(outlines, room)
    results = [
        ClientResult(client, {name: states[number] for name, number in numbers.items()}, values)
        for client, values, numbers in message["results"]
    ]
    traffic.merge(message["traffic"])
    return results
