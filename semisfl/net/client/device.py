"""Serve a server's questions in a client's process; its images never leave it.

The client is a block of one: the engine that simulates a hundred clients computes this one's part,
so a run over the network and a simulated one do the same arithmetic.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from semisfl.engine.hardware import Hardware
from semisfl.fleet.base import ClientWork
from semisfl.fleet.caps import Price
from semisfl.net import messages, ranges
from semisfl.net.client import agreement
from semisfl.net.client.connection import Connection
from semisfl.net.client.frame_io import FrameIO
from semisfl.net.client.full_round import ClientFullRound, Interrupted, refusing
from semisfl.net.client.lines import brief_logger
from semisfl.net.client.member import Images, Member
from semisfl.net.client.rejection import Rejected
from semisfl.net.client.split_round import ClientSplitRounds
from semisfl.net.client.stream import Received
from semisfl.net.frames import Frame
from semisfl.net.terms import Terms, placed_model
from semisfl.settings import lookup
from semisfl.settings.counts import counted
from semisfl.settings.policy import PolicyBreach
from semisfl.stopping import StopFlag, Stopped

log = brief_logger(__name__)

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
        self._connection = connection
        self._allowance = connection.owner.allowance
        self._images = images
        self._works: Mapping[str, ClientWork] = {}
        self._device = device
        self._stop = stop or StopFlag()
        self.frames = FrameIO(connection, self._stop)
        self._split_rounds = ClientSplitRounds(self.frames)
        self._begun = agreement.BegunRounds()
        self._steps: Mapping[str, Callable[[Received, Frame], None]] = {
            "welcome": self._welcome,
            "enrolled": self._enrolled,
            "split": self._split,
            "split_alone": self._split,
            "gradients": self._gradients,
            "full": self._full,
        }

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
        member = self.frames.joined
        return (len(member.images), member.skipped) if member else (0, 0)

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
                received = question = received or self.frames.receive()
                try:
                    self._handle(question)
                    received = None
                except Interrupted as interruption:
                    received = interruption.received
                    self.frames.expect_round()  # nothing more of the round that it ends
                except PolicyBreach as breach:
                    self.frames.answer(question, "refusal", {"reason": breach.to_server})
                    reason = f"this device's policy ends its part: {breach}"
                    raise Rejected(reason, "policy") from breach
        except Stopped:
            self._stopped_while = self.doing
            # The server also ends the stream after the goodbye below.
            self.finished = self._connection.over.is_set()
        finally:
            self._connection.close()

    def _handle(self, received: Received) -> None:
        frame = self.frames.decode(received)
        if frame is not None:
            self._steps[frame.kind.partition(":")[0]](received, frame)

    # --- joining ---------------------------------------------------------------------------------

    def _welcome(self, received: Received, frame: Frame) -> None:
        self._doing = "checking the terms"
        # The terms themselves count at every connection, not the name of the run that comes with them.
        terms = Terms.from_json(frame.fields["terms"], self._connection.methods)
        frames = self.frames
        if frames.joined is None or frames.joined.terms != terms:
            placed_model(terms.config.model, terms.shape, terms.classes)  # or a WireError
            self._connection.owner.approval.check(terms.digest)
            # Its images and model leave the memory before those of the new terms come.
            frames.joined = None
            frames.outgoing.agree(terms.config)
            self._works = lookup.works(lookup.method(terms.config.method))
            hardware = Hardware(self._device, terms.config.runtime)
            self._doing = "loading its images"
            frames.joined = Member(terms, self._images, hardware)
            schemas = frames.joined.schemas
            split = {"split": schemas.split, "split_alone": schemas.split_alone}
            frames.beginnings = {"full": messages.FULL} if self._works else split
            self._connection.run = terms.run
        member = frames.member
        self._allowance.check(frames.outgoing.policy, self._price(member.config.clients.steps))
        frames.expect({"enrolled": messages.ENROLLED})
        # A round may begin before this thread has looked at "enrolled": leave room for it now.
        received.stream.assembler.limit = max(one.limit for one in frames.beginnings.values())
        ready = {"images": len(member.images), "skipped": member.skipped}
        frames.answer(received, "ready", {"model": member.schemas.digest, **ready})

    def _price(self, steps: int) -> Price:
        """Return what a round of ``steps`` takes of the caps."""
        if self._works:  # no features leave, but each round's model is made of every image
            return Price(len(self.frames.member.images))
        return Price.of_split(self.frames.outgoing.policy, steps, self.frames.member.held)

    def _enrolled(self, received: Received, frame: Frame) -> None:
        ranges.check("client", frame.fields["client"], ranges.CLIENTS)
        received.stream.enrolled = True
        self.frames.member.enrol(frame.fields["client"], self._stop, self.frames.outgoing)
        log.info(
            "taking part as client %d with %s",
            self.frames.member.client,
            counted(len(self.frames.member.images), "image"),
        )
        self._doing = WAITING
        self.frames.expect_round()

    # --- rounds ----------------------------------------------------------------------------------

    def _begin_round(self, fields: Mapping[str, Any]) -> None:
        """Spend a round of the caps before anything of it is sent, and log what is spent."""
        self._begun.add(self.frames.member)
        self._doing = f"training in round {fields['round'] + 1}"
        price = self._price(fields["steps"])
        self._allowance.take(self.frames.outgoing.policy, price)
        spent = self._allowance.total
        if self.rounds == 0 or math.isfinite(spent.bits):
            log.info("%s", spent.words(self.frames.outgoing.policy, price.images))

    def _end_round(self) -> None:
        self.rounds += 1
        self._doing = WAITING

    def _split(self, received: Received, frame: Frame) -> None:
        with_teacher = frame.kind == "split"
        agreement.check_split(self.frames.member.config, frame.fields, with_teacher=with_teacher)
        agreement.check_weights(frame.tensors)
        self._begin_round(frame.fields)
        with refusing():
            self._split_rounds.begin(received, frame)

    def _gradients(self, received: Received, frame: Frame) -> None:
        with refusing():
            last = self._split_rounds.step(received, frame)
        if last:
            self.frames.expect_round()
            self._end_round()
            self._split_rounds.send_bottom(received)

    def _full(self, received: Received, frame: Frame) -> None:
        fields = frame.fields
        work = self._works.get(fields["work"])
        if work is None:
            known = ", ".join(self._works)
            log.error("the server asks for work %r; known here: %s", fields["work"], known)
            return
        agreement.check_full(self.frames.member, work, fields)
        self._begin_round(fields)
        ClientFullRound(self.frames, received, fields["round"]).train(work, fields)
        self._end_round()
