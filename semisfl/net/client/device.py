"""Serve a server's questions in a client's process; its images never leave it.

The client is a block of one: the engine that simulates a hundred clients computes this one's part,
so a run over the network and a simulated one do the same arithmetic.
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from semisfl.engine.hardware import Hardware
from semisfl.fleet.base import ClientWork
from semisfl.fleet.caps import Price
from semisfl.fleet.outgoing import Cleared
from semisfl.net import messages, ranges
from semisfl.net.client import agreement
from semisfl.net.client.connection import Connection, Received, Stream
from semisfl.net.client.full_round import ClientFullRound, Interrupted, refusing
from semisfl.net.client.lines import brief_logger
from semisfl.net.client.member import Images, Member
from semisfl.net.client.rejection import Rejected
from semisfl.net.client.split_round import ClientSplitRounds
from semisfl.net.frames import Frame, Schema, WireError, decode
from semisfl.net.messages import Terms
from semisfl.net.terms import placed_model
from semisfl.settings import lookup
from semisfl.settings.counts import counted
from semisfl.settings.policy import PolicyBreach
from semisfl.stopping import StopFlag, Stopped

log = brief_logger(__name__)

WAIT_SECONDS = 0.02
"""Between two looks at whether the server has taken the last answers."""

CONNECTING = "connecting"
WAITING = "waiting for a round"


class Device:
    """Serve rounds until the run is finished or `stop` is called."""

    def __init__(
        self,
        connection: Connection,
        images: Images,
        device: str = "auto",
        stop: StopFlag | None = None,
    ) -> None:
        self.rounds = 0
        """Rounds this client did its part of to the end."""
        self._doing = CONNECTING
        self._stopped_while: str | None = None
        self.finished = False
        """Whether the device ended because the server reported that the run is finished."""
        self.outgoing = connection.outgoing
        self._connection = connection
        self._allowance, self._budget = connection.owner.allowance, connection.owner.budget
        self._images = images
        self._works: Mapping[str, ClientWork] = {}
        self._device = device
        self._stop = stop or StopFlag()
        self._member: Member | None = None
        self._split_rounds = ClientSplitRounds(self)
        self._begun = agreement.BegunRounds()
        self._stream: Stream | None = None
        self._expected: Mapping[str, Schema] = {}
        self._steps: Mapping[str, Callable[[Received, Frame], None]] = {
            "welcome": self._welcome,
            "enrolled": self._enrolled,
            "split": self._split,
            "split_alone": self._split,
            "gradients": self._gradients,
            "full": self._full,
        }

    @property
    def member(self) -> Member:
        assert self._member is not None, "the first frame of any connection is a welcome"
        return self._member

    @property
    def doing(self) -> str:
        """Return what it does now: connecting, checking the terms, loading its images, waiting or training."""
        now = self._doing if self._connection.connected else CONNECTING
        return self._stopped_while or now

    @property
    def bytes_moved(self) -> tuple[int, int]:
        """Return the bytes sent and received, framing included."""
        return self._connection.sent, self._connection.received

    @property
    def image_count(self) -> tuple[int, int]:
        """Return how many images the device trains with, and how many could not be read."""
        return (len(self._member.images), self._member.skipped) if self._member else (0, 0)

    @property
    def bits_per_image(self) -> float:
        """Return the most bits that all that was sent carries, over images held; inf: no bound."""
        return self._allowance.total.bits / max(self.image_count[0], 1)

    def stop(self) -> None:
        """Finish the iteration at hand, then say goodbye."""
        self._stop.request()

    def serve(self) -> None:
        """Return once the run is over or `stop` was called; raise `Rejected` if refused."""
        received: Received | None = None
        try:
            while True:
                received = question = received or self.receive()
                try:
                    self._handle(question)
                    received = None
                except Interrupted as interruption:
                    received = interruption.received
                    self.expect_round()  # nothing more of the round that it ends
                except PolicyBreach as breach:
                    self.answer(question, "refusal", {"reason": breach.to_server})
                    reason = f"this device's policy ends its part: {breach}"
                    raise Rejected(reason, "policy") from breach
        except Stopped:
            self._stopped_while = self.doing
            # The server also ends the stream after the goodbye below.
            self.finished = self._connection.over.is_set()
        finally:
            self._connection.close()

    def receive(self) -> Received:
        if self._member is not None:
            self._member.hardware.streams.before_waiting()
        while not self._stop.requested and not self._connection.over.is_set():
            received = self._connection.receive(0.2)
            if received is not None:
                return received
        raise Stopped

    def decode(self, received: Received) -> Frame | None:
        if received.stream is not self._stream:
            # Another connection: it starts with a welcome, whatever the last one was about.
            self._stream = received.stream
            self._expected = {"welcome": messages.WELCOME}
        try:
            # Each frame has its own buffer here, so its tensors may stay in it.
            return decode(received.data, self._expected, copy=False)
        except WireError as error:
            log.error("ignored a frame of the server: %s", error)
            return None

    def _handle(self, received: Received) -> None:
        frame = self.decode(received)
        if frame is not None:
            self._steps[frame.kind.partition(":")[0]](received, frame)

    def _expect(self, expected: Mapping[str, Schema]) -> None:
        assert self._stream is not None
        self._budget.frames(max(schema.held for schema in expected.values()))
        self._expected = expected
        self._stream.assembler.limit = max(schema.limit for schema in expected.values())

    def expect_round(self, **more: Schema) -> None:
        """Expect a round to begin, at any time: the server never ends an aborted one explicitly."""
        self._expect({**self._beginnings(), **more})

    def _beginnings(self) -> dict[str, Schema]:
        """Return the frames that begin a round of the accepted method: no other may be asked for."""
        if self._works:
            return {"full": messages.FULL}
        schemas = self.member.schemas
        return {"split": schemas.split, "split_alone": schemas.split_alone}

    def answer(
        self,
        received: Received,
        kind: str,
        fields: Mapping[str, Any],
        cleared: Cleared | None = None,
        codecs: Mapping[str, str] | str = "fp32",
        *,
        copy: bool = True,
    ) -> None:
        """Send an answer. ``copy``: training may change its tensors before the last byte is sent."""
        while received.stream.crowded and not self._stop.requested:
            time.sleep(WAIT_SECONDS)
        parts = self.outgoing.frame(kind, fields, cleared, codecs)
        received.stream.answer(received.ticket, [b"".join(parts)] if copy else parts)

    # --- joining ---------------------------------------------------------------------------------

    def _welcome(self, received: Received, frame: Frame) -> None:
        self._doing = "checking the terms"
        # The terms themselves count at every connection, not the name of the run that comes with them.
        terms = Terms.from_json(frame.fields["terms"], self._connection.methods)
        if self._member is None or self._member.terms != terms:
            placed_model(terms.config.model, terms.shape, terms.classes)  # or a WireError
            self._connection.owner.approval.check(terms)
            # Its images and model leave the memory before those of the new terms come.
            self._member = None
            self.outgoing.agree(terms.config)
            self._works = lookup.works(lookup.method(terms.config.method))
            hardware = Hardware(self._device, terms.config.runtime)
            self._budget.begin(terms, hardware, full_model=bool(self._works))
            self._doing = "loading its images"
            self._member = Member(terms, self._images, hardware, self._budget)
            self._connection.run = terms.run
        member = self.member
        self._allowance.check(self.outgoing.policy, self._price(member.config.clients.steps))
        self._expect({"enrolled": messages.ENROLLED})
        # A round may begin before this thread has looked at "enrolled": leave room for it now.
        received.stream.assembler.limit = max(one.limit for one in self._beginnings().values())
        ready = {"images": len(member.images), "skipped": member.skipped}
        self.answer(received, "ready", {"model": member.schemas.digest, **ready})

    def _price(self, steps: int) -> Price:
        """Return what a round of ``steps`` takes of the caps."""
        if self._works:  # no features leave, but each round's model is made of every image
            return Price(len(self.member.images))
        return Price.of_split(self.outgoing.policy, steps, self.member.held)

    def _enrolled(self, received: Received, frame: Frame) -> None:
        ranges.check("client", frame.fields["client"], ranges.CLIENTS)
        received.stream.enrolled = True
        self.member.enrol(frame.fields["client"], self._stop, self.outgoing)
        log.info(
            "taking part as client %d with %s",
            self.member.client,
            counted(len(self.member.images), "image"),
        )
        self._doing = WAITING
        self.expect_round()

    # --- rounds ----------------------------------------------------------------------------------

    def _begin_round(self, fields: Mapping[str, Any]) -> None:
        """Spend a round of the caps before anything of it is sent, and log what is spent."""
        self._begun.add(self.member)
        self._doing = f"training in round {fields['round'] + 1}"
        price = self._price(fields["steps"])
        self._allowance.take(self.outgoing.policy, price)
        spent = self._allowance.total
        if self.rounds == 0 or math.isfinite(spent.bits):
            log.info("%s", spent.words(self.outgoing.policy, price.images))

    def _end_round(self) -> None:
        self.rounds += 1
        self._doing = WAITING

    def _split(self, received: Received, frame: Frame) -> None:
        with_teacher = frame.kind == "split"
        agreement.check_split(self.member.config, frame.fields, with_teacher=with_teacher)
        agreement.check_weights(frame.tensors)
        self._begin_round(frame.fields)
        with refusing():
            self._split_rounds.begin(received, frame)

    def _gradients(self, received: Received, frame: Frame) -> None:
        with refusing():
            last = self._split_rounds.step(received, frame)
        if last:
            self.expect_round()
            self._end_round()
            self._split_rounds.send_bottom(received)

    def _full(self, received: Received, frame: Frame) -> None:
        fields = frame.fields
        work = self._works.get(fields["work"])
        if work is None:
            known = ", ".join(self._works)
            log.error("the server asks for work %r; known here: %s", fields["work"], known)
            return
        agreement.check_full(self.member, work, fields)
        self._begin_round(fields)
        ClientFullRound(self, received, fields["round"]).train(work, fields)
        self._end_round()
