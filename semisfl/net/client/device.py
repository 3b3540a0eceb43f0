"""A device: it answers a server's questions, and its images never leave it.

The device is a block of one client: the engine that simulates a hundred clients computes this one's part,
so a run over the network and a simulated one do the same arithmetic.

A connection begins with a *welcome*, which holds the terms of the run. The device checks them, builds its model from
them and loads its images, and answers *ready*; the server answers *enrolled* with the client's index. Then rounds
follow (`split_round`, `full_round`), or with a frozen bottom a single `upload`, after which the device ends. Every frame arrives in `Device.handle`, and every answer leaves through
`Device.answer`. Only the frames that are expected now are decoded. If the policy forbids an answer, the device sends a
*refusal* instead and ends.
"""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from semisfl.engine.hardware import Hardware
from semisfl.fleet.base import ClientWork
from semisfl.fleet.caps import RoundUse
from semisfl.fleet.outgoing import Cleared
from semisfl.net import messages, ranges
from semisfl.net.client import agreement
from semisfl.net.client.connection import Connection, Received, Stream
from semisfl.net.client.full_round import ClientFullRound, Interrupted
from semisfl.net.client.member import Images, Member
from semisfl.net.client.rejection import Rejected, plain
from semisfl.net.client.split_round import ClientSplitRound
from semisfl.net.client.upload import Upload
from semisfl.net.frames import Frame, Schema, WireError, decode
from semisfl.net.terms import Terms
from semisfl.settings import lookup
from semisfl.settings.config import ConfigError
from semisfl.settings.counts import plural
from semisfl.settings.policy import PolicyBreach
from semisfl.stopping import StopFlag, Stopped

log = logging.getLogger(__name__)

CONNECTING = "connecting"
WAITING = "waiting for a round"
OWN_FAULTS = (
    *(OSError, MemoryError, torch.OutOfMemoryError, ConfigError),
    getattr(torch, "AcceleratorError", MemoryError),  # torch 2.7 has none
)
"""Failures of the device itself, not of what a server sent."""


class Device:
    """Answer the questions of a server until the run is finished or `stop` is called.

    A subclass or a test may replace `decode` and `answer`, through which every frame passes.
    """

    def __init__(
        self,
        connection: Connection,
        images: Images,
        device: str = "auto",
        stop: StopFlag | None = None,
    ) -> None:
        """Serve over a ``connection``.

        Args:
            images: loads this device's images in the shape of a run, once the terms are accepted.
            device: auto, cpu, cuda or cuda:N.
            stop: ends the device after the iteration at hand.
        """
        self.rounds = 0
        """Rounds this device did its part of to the end."""
        self.finished = False
        """Whether the device ended because the server needs nothing more of it."""
        self.joined: Member | None = None
        """The device's part in a run, once it has accepted the terms."""
        self.outgoing, self.allowance = connection.outgoing, connection.owner.allowance
        self.beginnings: Mapping[str, Schema] = {}
        """The frames that begin a round of the accepted method: no other may be asked for."""
        self.stream: Stream | None = None
        """The stream of the last frame."""
        self.upload: Upload | None = None
        """What is sent with a frozen bottom."""
        self.connection = connection
        """The connection to the server; it counts the bytes sent and received."""
        self._images, self._device = images, device
        self._stop = stop or StopFlag()
        self._expected: Mapping[str, Schema] = {}
        """The frames that are accepted now: kind -> the fields and tensors that it must have."""
        self._works: Mapping[str, ClientWork] = {}
        self._split_round: ClientSplitRound | None = None
        self._doing, self._stopped_while = CONNECTING, ""
        self._steps: dict[str, Callable[[Received, Frame], None]] = {
            "welcome": self._welcome,
            "enrolled": self._enrolled,
            "split": self._split,
            "split_alone": self._split,
            "gradients": self._gradients,
            "full": self._full,
        }

    @property
    def member(self) -> Member:
        """Return the device's part in the run that it has joined."""
        assert self.joined is not None, "the first frame of any connection is a welcome"
        return self.joined

    @property
    def doing(self) -> str:
        """Return what it does now: connecting, checking the terms, loading its images, waiting or training."""
        now = self._doing if self.connection.connected else CONNECTING
        return self._stopped_while or now

    def stop(self) -> None:
        """Finish the iteration at hand, then say goodbye."""
        self._stop.request()

    def serve(self) -> None:
        """Return once the run is over or `stop` was called; raise `Rejected` if refused."""
        received: Received | None = None
        try:
            while not self.finished:
                received = question = received or self.receive()
                try:
                    self.handle(question)
                    received = None
                except Interrupted as interruption:
                    received = interruption.received
                    self.expect_round()  # nothing more of the round that it ends
                except PolicyBreach as breach:
                    self.answer(question, "refusal", {"reason": breach.to_server})
                    reason = f"this device's policy ends its part: {breach}"
                    raise Rejected(reason, "policy") from breach
        except WireError as error:  # what the server sent is no mistake made here
            raise Rejected(str(error), "refused") from error
        except Stopped:
            self._stopped_while = self.doing
            # The server also ends the stream after the goodbye below.
            self.finished = self.connection.over.is_set()
        finally:
            self.connection.close()

    # --- questions and answers -------------------------------------------------------------------

    def receive(self) -> Received:
        """Return the next frame; raise `Stopped` if there will be none."""
        if self.joined is not None:
            self.joined.hardware.streams.before_waiting()
        while not self._stop.requested and not self.connection.over.is_set():
            received = self.connection.receive(0.2)
            if received is not None:
                return received
        raise Stopped

    def handle(self, received: Received) -> None:
        """Answer one question; raise `PolicyBreach` if that fails on what the server sent."""
        frame = self.decode(received)
        if frame is None:
            return
        step = self._steps[frame.kind]
        if frame.kind in ("welcome", "enrolled"):
            return step(received, frame)
        try:
            step(received, frame)
        except (Interrupted, PolicyBreach, Rejected, *OWN_FAULTS):
            raise
        except Exception as error:  # after a restart it would fail again
            reason = " ".join(str(error).split())
            raise PolicyBreach(
                f"the server's round cannot be done: {type(error).__name__}: {reason:.200}"
            ) from error

    def decode(self, received: Received) -> Frame | None:
        """Return the frame; None if it is not expected now or not valid."""
        if received.stream is not self.stream:
            # Another connection: it starts with a welcome, whatever the last one was about.
            self.stream = received.stream
            self._expected = {"welcome": messages.WELCOME}
        try:
            # Each frame has its own buffer here, so its tensors may stay in it.
            return decode(received.data, self._expected)
        except WireError as error:
            log.error("ignored a frame of the server: %s", plain(str(error)))
            return None

    def expect_round(self, **more: Schema) -> None:
        """Expect a round to begin, or one of ``more`` frames.

        A round may begin at any time: the server never ends an aborted one explicitly.
        """
        self._expected = {**self.beginnings, **more}

    def expect(self, **frames: Schema) -> None:
        """Expect one of these frames and no other."""
        self._expected = frames

    def answer(
        self,
        received: Received,
        kind: str,
        fields: Mapping[str, Any],
        cleared: Cleared | None = None,
        codecs: Mapping[str, str] | str = "fp32",
    ) -> None:
        """Send an answer to the question that was ``received``."""
        parts = self.outgoing.frame(kind, fields, cleared, codecs)
        received.stream.answer(received.ticket, b"".join(parts))

    # --- joining ---------------------------------------------------------------------------------

    def _welcome(self, received: Received, frame: Frame) -> None:
        """Check the terms, join their run if it is another one than before, and answer that the device is ready."""
        self._doing = "checking the terms"
        # The terms themselves count at every connection, not the name of the run that comes with them.
        terms = Terms.from_json(frame.fields["terms"], self.connection.methods)
        if self.joined is None or self.joined.terms != terms:
            terms.placed()  # or a WireError
            self.connection.owner.approval.check(terms.digest)
            # Its images and model leave the memory before those of the new terms come.
            self.joined = None
            self.outgoing.agree(terms.config)
            self._works = lookup.works(lookup.method(terms.config.method))
            self._doing = "loading its images"
            hardware = Hardware(self._device, terms.config.runtime)
            self.joined = Member(terms, self._images, hardware)
            schemas = self.joined.schemas
            split = {"split": schemas.split, "split_alone": schemas.split_alone}
            self.beginnings = {"full": messages.FULL} if self._works else split
            self.connection.run = terms.run
            self.upload = Upload(self, self.connection.name) if terms.bottom else None
            self._steps |= self.upload.steps if self.upload else {}
        member = self.member
        if self.upload is None:
            self.allowance.check(self.outgoing.policy, self._round_use(member.config.clients.steps))
        self._expected = {"enrolled": messages.ENROLLED}
        ready = {"images": len(member.images), "skipped": member.skipped}
        self.answer(received, "ready", {"model": member.schemas.digest, **ready})

    def _enrolled(self, received: Received, frame: Frame) -> None:
        """Take the client's index, and wait for rounds."""
        ranges.check("client", frame.fields["client"], ranges.CLIENTS)
        received.stream.enrolled = True
        self.member.enrol(frame.fields["client"], self._stop, self.outgoing)
        log.info(
            "taking part as client %d with %s",
            self.member.client,
            plural(len(self.member.images), "image"),
        )
        self._doing = WAITING
        if self.upload is not None:
            self._doing = "encoding its images"
            return self.upload.begin()
        self.expect_round()

    # --- rounds ----------------------------------------------------------------------------------

    def _round_use(self, steps: int) -> RoundUse:
        """Return what a round of ``steps`` uses of the quotas."""
        if self._works:  # no features leave, but each round's model is made of every image
            return RoundUse()
        return RoundUse.of_split(self.outgoing.policy, steps, self.member.sizes)

    def _begin_round(self, fields: Mapping[str, Any]) -> None:
        """Count a round, on disk before anything of it is sent, and log what was sent so far."""
        policy = self.outgoing.policy
        self._doing = f"training in round {fields['round'] + 1}"
        self.allowance.take(policy, self._round_use(fields["steps"]))
        spent = self.allowance.total
        if self.rounds == 0 or math.isfinite(spent.bits):
            log.info("%s", spent.words(policy))

    def _end_round(self) -> None:
        self.rounds += 1
        self._doing = WAITING

    def _split(self, received: Received, frame: Frame) -> None:
        """Begin a split round: answer its weights with the features of the first step."""
        agreement.check_split(self.member.config, frame)
        self._begin_round(frame.fields)
        self._split_round = ClientSplitRound(self, frame)
        self._split_round.send_features(received)

    def _gradients(self, received: Received, frame: Frame) -> None:
        """Train with a step's gradients; answer with the next step's features, or with the bottom after the last."""
        split_round = self._split_round
        assert split_round is not None, "gradients are expected in a split round alone"
        split_round.descend(frame)
        if not split_round.over:
            return split_round.send_features(received)
        self.expect_round()
        self._end_round()
        split_round.send_bottom(received)

    def _full(self, received: Received, frame: Frame) -> None:
        """Do the device's side of a full-model round to its end."""
        work = agreement.check_full(self.member, self._works, frame.fields)
        self._begin_round(frame.fields)
        ClientFullRound(self, received, frame.fields["round"]).train(work, frame.fields)
        self._end_round()
