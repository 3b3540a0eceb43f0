"""Ask clients and collect their answers, with deadlines and checks."""

import logging
import queue
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from semisfl.fleet.base import ClientResult, State
from semisfl.fleet.byte_counts import Kind
from semisfl.net import chunks, messages
from semisfl.net.chunks import Parts
from semisfl.net.frames import Frame, decode, payload_bytes
from semisfl.net.headers import WireError
from semisfl.net.server.admission import refused_by_policy
from semisfl.net.server.answer_seconds import AnswerSeconds
from semisfl.net.server.context import ServerContext
from semisfl.net.server.full_round import Due
from semisfl.net.server.listener import Listener
from semisfl.net.server.session import Session
from semisfl.net.server.value_checks import (
    SizeChecks,
    impossible,
    miscounted,
    ranges,
    sizes,
    update_size,
)
from semisfl.stopping import Stopped

log = logging.getLogger(__name__)

STOP_SECONDS = 4.0
"""How long an iteration may still take to finish once the server is asked to stop."""

SLOWEST = 10.0
"""A client whose answers in a round take more than this many times the median client's is left out of it. It has
one deadline more, and the time of its bytes at the lowest rate."""

TOO_SLOW = "too slow: no progress until the deadline"
Take = Callable[[int, Frame], None]


@dataclass
class Outgoing:
    """Hold the bytes sent to a client; counted once, when all of them were sent."""

    client: int
    sizes: Mapping[Kind, int]
    counted: bool = False


@dataclass(frozen=True)
class Awaited:
    """Hold a question to one client until it is answered."""

    session: Session
    ticket: int
    outgoing: Outgoing
    due: Due


@dataclass
class AnswerTimes:
    """Hold how long a client needed for its answers of this round, and how long their bytes may take alone."""

    seconds: float = 0.0
    transfer: float = 0.0


class Questions:
    """Ask at most one question per client at a time. Only the thread that trains uses this."""

    def __init__(self, context: ServerContext, listener: Listener) -> None:
        self.size_checks = SizeChecks(updates_limited=context.config.robust.aggregate != "mean")
        self.answer_seconds = AnswerSeconds(context.config.network.deadline)
        self._context, self._listener = context, listener
        self._all_sent: deque[Outgoing] = deque()
        self._awaited: dict[int, Awaited] = {}
        self.left_out: set[int] = set()
        """The clients that were asked in this round and are left out of it."""
        self.too_slow: set[int] = set()
        """Those of them that all others waited for, or would have in every step."""
        self._times: defaultdict[int, AnswerTimes] = defaultdict(AnswerTimes)
        self._began_with: dict[int, Session | None] = {}

    def __len__(self) -> int:
        return len(self._awaited)

    def name(self, client: int) -> str:
        """Return the device of this round that is ``client``; its place may be another's by now."""
        session = self._began_with.get(client)
        return self._context.roster.name(client) if session is None else session.identity

    def start_round(self) -> None:
        self._awaited.clear()
        self.left_out.clear()
        self.too_slow.clear()
        self._times.clear()
        self._began_with.clear()
        self.size_checks.start_round()

    def ask(self, client: int, frame: Parts, crossing: Mapping[Kind, int], due: Due) -> None:
        """Send ``frame`` to ``client`` and await what is ``due``; leave out an absent client."""
        session = self._listener.table.enrolled.get(client)
        self._awaited.pop(client, None)
        # A client that answered, crashed and came back knows nothing of this round.
        if session is None or self._began_with.setdefault(client, session) is not session:
            self._leave_out(client, "it is not here")
            return
        outgoing = Outgoing(client, crossing)
        ticket = session.ask(
            frame,
            max(schema.limit for schema in due.frames.values()),
            lambda: self._all_sent.append(outgoing),
            copy=len(frame) > 1 or not isinstance(frame[0], bytes),
            deadline=self._context.config.network.deadline,
            steps=due.steps,
        )
        self._awaited[client] = Awaited(session, ticket, outgoing, due)
        self._times[client].transfer += session.patience.size / chunks.LOWEST_RATE

    def collect(self, kind: Kind, take: Take) -> set[int]:
        """Pass each answer to ``take`` as it arrives, until no client is awaited any more.

        ``take`` may ask the client another question. If it or the frame's schema refuses an answer
        (WireError), the client is left out of the round and gets a strike. Return the clients whose
        answers were taken but must not be used, because they are too far from all others.
        """
        stop_at: float | None = None
        while self._awaited:
            if self._context.stop.requested:
                stop_at = stop_at or time.monotonic() + STOP_SECONDS
                if time.monotonic() > stop_at:
                    raise Stopped
            overdue = min(item.session.patience.ends for item in self._awaited.values())
            try:
                wait = min(0.5, max(0.0, overdue - time.monotonic()))
                session, ticket, data = self._context.inbox.get(timeout=wait)
            except queue.Empty:
                self._leave_out_overdue()
                continue
            item = self._awaited.get(session.client)
            if item is None or item.session is not session:
                continue
            if data is None:
                self._leave_out(session.client, "its connection was lost")
            elif ticket == item.ticket:
                self._answered(item, data, kind, take)
            self._leave_out_overdue()
        while self._all_sent:
            self._count(self._all_sent.popleft())
        return self.refuse_outliers()

    def refuse_outliers(self) -> set[int]:
        """Leave out the clients whose values stand out, and return them."""
        outliers = self.size_checks.outliers()
        for client, reason in outliers.items():
            self._refuse_values(client, reason)
        return set(outliers)

    def refuse_far(
        self, results: Iterable[ClientResult], sent_to: Callable[[int], Mapping[str, State]]
    ) -> set[int]:
        """Leave out the clients whose states are too far from what they were sent, or whose losses are
        from those of the others, and return them."""
        refused = set()
        for result in results:
            states, sent = result.states, sent_to(result.client)
            faults = (miscounted(state, sent.get(name, {})) for name, state in states.items())
            if (fault := next(filter(None, faults), None)) is not None:
                self._refuse_values(result.client, fault)
                refused.add(result.client)
                continue
            known = states.keys() & sent.keys()
            moved = {f"{name} update": update_size(states[name], sent[name]) for name in known}
            numbers = result.numbers.items()
            losses = {name: abs(value) for name, value in numbers if name.startswith("loss")}
            self.size_checks.note_answer(result.client, moved | losses)
        return refused | self.refuse_outliers()

    def give_up(self) -> None:
        """Stop waiting for every client."""
        for item in self._awaited.values():
            item.session.abandon("the round was given up; the next one needs a new connection")
        self._awaited.clear()

    def _leave_out_overdue(self) -> None:
        now = time.monotonic()
        overdue = [c for c, item in self._awaited.items() if now >= item.session.patience.ends]
        if overdue and self._others():
            self.too_slow.update(overdue)
        for client in overdue:
            session = self._awaited[client].session
            session.abandon(TOO_SLOW)
            self._leave_out(client, session.patience.reason())
        self._leave_out_slow(now)

    def _others(self) -> list[float]:
        """Return the seconds of the clients that owe no answer now; none if they are under half of all, or under two."""
        others = [
            times.seconds for client, times in self._times.items() if client not in self._awaited
        ]
        return others if len(others) >= max(2, len(self._awaited)) else []

    def _leave_out_slow(self, now: float) -> None:
        """Leave out clients that answer within every deadline, and far more slowly than the others."""
        if not any(
            self._took(client, now) > item.session.patience.deadline
            for client, item in self._awaited.items()
        ):
            return  # as after nearly every answer
        if not (others := self._others()):
            return
        usual = statistics.median(others)
        for client, item in list(self._awaited.items()):
            deadline, times = item.session.patience.deadline, self._times[client]
            seconds = self._took(client, now)
            if seconds > deadline + SLOWEST * usual + times.transfer:
                item.session.abandon(TOO_SLOW)
                self.too_slow.add(client)
                reason = f"its answers of this round took {seconds:.3g} s, the median client's {usual:.3g} s"
                self._leave_out(client, reason)

    def _took(self, client: int, now: float) -> float:
        """Return the seconds of an awaited client's answers of this round, with the one that it owes."""
        return self._times[client].seconds + now - self._awaited[client].session.patience.asked_at

    def _leave_out(self, client: int, reason: str) -> None:
        name, item = self.name(client), self._awaited.pop(client, None)
        if item is not None:
            self.answer_seconds.add(name, time.monotonic() - item.session.patience.asked_at)
        self._times.pop(client, None)
        self.left_out.add(client)
        log.warning("%s is left out of this round: %s", name, reason)
        self._context.device_log.left_out(name, client, reason)

    def _answered(self, item: Awaited, data: bytearray, kind: Kind, take: Take) -> None:
        """Hand an answer on if it may be used. Its client is no longer awaited either way."""
        client = item.session.client
        self._awaited.pop(client)
        seconds = time.monotonic() - item.session.patience.asked_at
        self._times[client].seconds += seconds
        self.answer_seconds.add(self.name(client), seconds)
        try:
            frame = self._frame(item.due, data, kind)
            self._count(item.outgoing)
            if frame.kind == "refusal":
                reason = refused_by_policy(frame.fields["reason"]).reason
                self._leave_out(client, reason)
                self._listener.penalties.dismiss(item.session, reason)
                return
            if frame.tensors:
                self._context.traffic.add(
                    kind, "up", client, payload_bytes(item.due.frames[frame.kind])
                )
            extremes = ranges(frame.tensors)
            fault = impossible(frame.tensors, extremes)
            if fault is not None:
                self._refuse_values(client, fault)
                return
            take(client, frame)
            noise = item.session.policy.noise * (item.session.policy.clip or 0.0)
            self.size_checks.note_answer(client, sizes(extremes, noise))
        except WireError as error:
            self._leave_out(client, str(error))
            self._listener.penalties.offend(item.session, str(error))

    @staticmethod
    def _frame(due: Due, data: bytearray, kind: Kind) -> Frame:
        # Features are put together, so copied, before their client is asked anything else.
        expected = {**due.frames, "refusal": messages.REFUSAL}
        frame = decode(data, expected, copy=kind != "features")
        for name, value in due.fields.items() if frame.kind != "refusal" else ():
            if frame.fields[name] != value:
                raise WireError(f"{frame.kind} says {name} = {frame.fields[name]}, it is {value}")
        return frame

    def _refuse_values(self, client: int, fault: str) -> None:
        """Leave the client out; it gets no strike if values of the server, or now and then of others, may be the cause."""
        self._leave_out(client, fault)
        self._context.held_back.note(client, fault)
        checks, penalties, name = self.size_checks, self._listener.penalties, self.name(client)
        if checks.is_excused(client) and (checks.server_is_unusual or penalties.excuse(name)):
            log.warning("values of the server or of others may be the cause: this is not a strike")
        else:
            penalties.strike(name, fault)

    def _count(self, outgoing: Outgoing) -> None:
        """Count a question's bytes once: an answer proves that the question has arrived."""
        if not outgoing.counted:
            outgoing.counted = True
            for kind, size in outgoing.sizes.items():
                self._context.traffic.add(kind, "down", outgoing.client, size)
