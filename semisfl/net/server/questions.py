"""Ask devices and check their answers: the one place where a round's frames are sent and received.

A round of any method is a number of questions to each client, one at a time. `NetworkFleet` asks them through
`ServerSplitRound` or `ServerFullRound`, and then calls `Questions.collect`, which waits for all answers. A client
drops out of the round, and only of this round, when

- it is not here, or its connection breaks;
- it makes no progress for ``network.deadline`` seconds;
- its answer breaks the protocol, has impossible values, or is a refusal by its own policy.

Every byte count of a network run is made here. What was sent to a client counts once its answer proves that it
arrived; so a client that dies leaves the same counts, however much of a question was on its way.
"""

import logging
import queue
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from semisfl.fleet.base import AbnormalValues, HeldBack
from semisfl.fleet.byte_counts import Kind, Traffic
from semisfl.net import messages
from semisfl.net.frames import Frame, Schema, WireError, decode, payload_bytes
from semisfl.net.server.admission import refused_by_policy
from semisfl.net.server.session import Session
from semisfl.net.server.sessions import Sessions
from semisfl.net.server.value_checks import impossible, largest
from semisfl.settings.config import Config
from semisfl.stopping import StopFlag, Stopped

log = logging.getLogger(__name__)

STOP_SECONDS = 4.0
"""How long an iteration may still take to finish once the server is asked to stop."""
TIMES, SHARE = 3.0, 0.1
"""A device makes a round slow if its answers take this many times the median of the other devices, and this share of
a deadline longer."""

Take = Callable[[int, Frame], None]
"""Called with a client's index and its answer, which passed all checks. It may ask the client again."""


@dataclass(frozen=True)
class Due:
    """Describe the expected answer: one of these frames (kind -> schema), with these values in its fields."""

    frames: Mapping[str, Schema]
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Question:
    """A question that waits for its answer, from the session that it was sent to."""

    session: Session
    ticket: int
    due: Due
    asked_at: float


class Questions:
    """Ask at most one question per client at a time, and hold what is known about the round's clients.

    Only the thread that trains uses this. Answers reach it through `Sessions.inbox`.
    """

    def __init__(
        self,
        config: Config,
        sessions: Sessions,
        traffic: Traffic,
        held_back: HeldBack,
        stop: StopFlag,
    ) -> None:
        self.left_out: set[int] = set()
        """The clients that were asked in this round and are left out of it."""
        self.too_slow: set[int] = set()
        """Those of them that most others waited for until the deadline."""
        self.sizes: defaultdict[str, dict[int, float]] = defaultdict(dict)
        """How large the values of this round are: "features" or "update" -> client -> size."""
        self.last_seconds: Mapping[str, float] = {}
        """How long the answers of each device took in the last round, with its repetitions, in seconds."""
        self._seconds: defaultdict[str, float] = defaultdict(float)
        """The same for the round under way."""
        self._slowest: str | None = None
        self._deadline, self._sessions = config.network.deadline, sessions
        self._traffic, self._held_back, self._stop = traffic, held_back, stop
        self._open: dict[int, Question] = {}
        """The question that each client has not answered yet."""
        self._of_round: dict[int, Session] = {}
        """The session of each client when it was first asked in this round."""
        self._answered: set[int] = set()
        """The clients whose last question of this round is answered."""
        self._faults: dict[int, str] = {}
        """The clients whose last answer has impossible values, with the reason."""
        self._unproven: defaultdict[int, list[Mapping[Kind, int]]] = defaultdict(list)
        """Bytes sent to each client since its last answer. They count once an answer proves that they arrived."""

    def name(self, client: int) -> str:
        """Return the device that is ``client`` in this round; its place may be another's by now."""
        session = self._of_round.get(client)
        return self._sessions.roster.name(client) if session is None else session.identity

    def start_round(self) -> None:
        """Forget the last round."""
        for of_round in (self._open, self._of_round, self._unproven, self.sizes):
            of_round.clear()
        for clients in (self.left_out, self.too_slow, self._answered):
            clients.clear()

    def ask(self, client: int, frames: list[bytes], sizes: Mapping[Kind, int], due: Due) -> None:
        """Send ``frames`` to ``client``, the last of which is a question, and await what is ``due``.

        ``sizes`` are the bytes of tensors in them, by kind. A client that is not here is left out of the round.
        """
        session = self._sessions.enrolled.get(client)
        # A client that answered, crashed and came back knows nothing of this round.
        if session is None or self._of_round.setdefault(client, session) is not session:
            self._leave_out(client, "it is not here")
            return
        for frame in frames[:-1]:
            session.tell(frame)
        ticket = session.ask(frames[-1], max(schema.limit for schema in due.frames.values()))
        self._unproven[client].append(sizes)
        self._open[client] = Question(session, ticket, due, time.monotonic())

    def collect(self, kind: Kind, take: Take) -> None:
        """Pass each answer to ``take`` as it arrives, until every question is answered or its client left out.

        ``kind`` is how the answers' bytes are counted. An answer that breaks the protocol, or that ``take`` refuses
        with a `WireError`, is a strike against its device. So is an answer with impossible values; but if most
        devices send such values, what the server sent is the reason, and `AbnormalValues` is raised.
        """
        self._faults.clear()
        stop_at: float | None = None
        while self._open:
            if self._stop.requested:
                stop_at = stop_at or time.monotonic() + STOP_SECONDS
                if time.monotonic() > stop_at:
                    raise Stopped
            try:
                session, ticket, data = self._sessions.inbox.get(timeout=self._patience())
            except queue.Empty:
                self._leave_out_overdue()
                continue
            question = self._open.get(session.client)
            if question is None or question.session is not session:
                continue
            if data is None:
                self._leave_out(session.client, "its connection was lost")
            elif ticket == question.ticket:
                self._check(question, data, kind, take)
        if len(self._faults) > len(self._answered):
            some = next(iter(self._faults.values()))
            raise AbnormalValues(f"most devices answer with impossible values: {some}")
        for client, fault in self._faults.items():
            session = self._of_round[client]
            self._held_back.note(client, fault)
            self._sessions.breach(session.peer, session.identity, fault)

    def _check(self, question: Question, data: bytearray, kind: Kind, take: Take) -> None:
        """Check one answer and pass it to ``take``. In any case stop waiting for it, and count its bytes."""
        session, due, client = question.session, question.due, question.session.client
        self._close(question)
        for sizes in self._unproven.pop(client, ()):
            for sent, size in sizes.items():
                self._traffic.add(sent, "down", client, size)
        try:
            frame = decode(data, {**due.frames, "refusal": messages.REFUSAL})
            if frame.kind == "refusal":
                reason = refused_by_policy(frame.fields["reason"]).reason
                self._leave_out(client, reason)
                self._sessions.dismiss(session, reason)
                return
            for name, value in due.fields.items():
                if frame.fields[name] != value:
                    raise WireError(
                        f"{frame.kind} has {name} = {frame.fields[name]}; {value} is due"
                    )
            if frame.tensors:
                self._traffic.add(kind, "up", client, payload_bytes(due.frames[frame.kind]))
            if (fault := impossible(frame.tensors)) is not None:
                self._faults[client] = fault
                self._leave_out(client, fault)
                return
            if frame.kind == "features":
                self.note_size("features", client, largest(frame.tensors["student"]))
            take(client, frame)
        except WireError as error:
            self._leave_out(client, str(error))
            self._sessions.offend(session, str(error))

    def note_size(self, kind: str, client: int, size: float) -> None:
        """Note how large the values of a client are, for `stands_out`; the largest of the round counts."""
        self.sizes[kind][client] = max(size, self.sizes[kind].get(client, 0.0))

    def give_up(self) -> None:
        """Wait for no client any more; an answer that still comes is ignored."""
        self._open.clear()

    def end_round(self) -> None:
        """Log which device made the round slow, if it is another than before."""
        self.last_seconds, self._seconds = self._seconds, defaultdict(float)
        if len(self.last_seconds) < 2:
            return
        *others, (name, seconds) = sorted(self.last_seconds.items(), key=lambda item: item[1])
        usual = statistics.median(took for _, took in others)
        if name != self._slowest and seconds > max(TIMES * usual, usual + SHARE * self._deadline):
            self._slowest = name
            log.warning(
                "%s makes the rounds slow: its answers of this round took %.3g s, the median of the others %.3g s",
                name,
                seconds,
                usual,
            )

    # --- who is waited for -------------------------------------------------------------------------

    def _patience(self) -> float:
        """Return the seconds until a client is overdue, half a second at most."""
        earliest = min(question.session.progress for question in self._open.values())
        return min(0.5, max(0.0, earliest + self._deadline - time.monotonic()))

    def _leave_out_overdue(self) -> None:
        """Leave out the clients without progress for a deadline.

        They are far too slow if most others have answered; of two clients nobody can say who is slow.
        """
        now = time.monotonic()
        overdue = [
            client
            for client, question in self._open.items()
            if now >= question.session.progress + self._deadline
        ]
        if len(self._answered - self._open.keys()) >= max(2, len(self._open)):
            self.too_slow.update(overdue)
        for client in overdue:
            self._leave_out(client, f"no progress for network.deadline = {self._deadline:g} s")

    def _leave_out(self, client: int, reason: str) -> None:
        name = self.name(client)
        if (question := self._open.get(client)) is not None:
            self._close(question)
        self._answered.discard(client)
        self.left_out.add(client)
        log.warning("%s is left out of this round: %s", name, reason)
        self._sessions.device_log.note("left_out", name, client=client, reason=reason)

    def _close(self, question: Question) -> None:
        """Wait for this answer no longer, and add up how long the wait for it took."""
        client = question.session.client
        del self._open[client]
        self._answered.add(client)
        self._seconds[self.name(client)] += time.monotonic() - question.asked_at
