"""Send a full-model round's plan to the other ranks, and their results back.

States cross once per rank that needs them, however many of its clients share them. What a client
asks for during the round is sent along, and counted only if it was asked for.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from semisfl.fleet.base import ClientResult, ClientWork, FullRound, State
from semisfl.fleet.byte_counts import Traffic
from semisfl.fleet.cluster.cluster_split import Block
from semisfl.fleet.cluster.ranks import Ranks
from semisfl.fleet.packing import outline, pack, room_for, unpack


class _States:
    """Number the states of a round, each of them once."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self.states: list[State] = []
        self.outlines: list[Any] = []
        self.outline_of: list[int] = []

    def number(self, state: State) -> int:
        if id(state) not in self._numbers:
            self._numbers[id(state)] = len(self.states)
            self.states.append(state)
            shape = outline(state)
            if shape not in self.outlines:
                self.outlines.append(shape)
            self.outline_of.append(self.outlines.index(shape))
        return self._numbers[id(state)]

    def numbers(self, states: Mapping[str, State]) -> dict[str, int]:
        return {name: self.number(state) for name, state in states.items()}


def send_plan(ranks: Ranks, work: ClientWork, plan: FullRound, blocks: Sequence[Block]) -> None:
    """Send the plan and its states from rank 0 to the others."""
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
    """Return the numbers of the states that are sent to single clients of ``block``."""
    numbers = {
        number
        for entries in single.values()
        for client, states in entries
        if client in block
        for number in states.values()
        if number >= for_all
    }
    return sorted(numbers)


def receive_plan(ranks: Ranks, message: Mapping[str, Any]) -> FullRound:
    """Return the plan for this rank's clients."""
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
    """Send this rank's results to rank 0."""
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
    """Receive the results of ``rank`` and count their bytes; return None if it was stopped."""
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
