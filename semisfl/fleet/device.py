"""A client's process: does what its server asks, with images that never leave it.

On the device the client is a fleet of one: the same engine that simulates a hundred clients
carries out this one's part, so a run over the network and a simulated one do the same arithmetic.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from semisfl.fleet import protocol
from semisfl.fleet.base import ClientRuntime, ClientWork, FullRound, SplitRound, State
from semisfl.fleet.link import Link, Received, Stream
from semisfl.fleet.member import Images, Member
from semisfl.fleet.protocol import Terms, joined, outline, separated
from semisfl.fleet.wire import Frame, Schema, WireError, decode, encode
from semisfl.hardware import Hardware, Stopped

log = logging.getLogger(__name__)


class Interrupted(Exception):
    """The server went on without this client: here is what it wants instead."""

    def __init__(self, received: Received) -> None:
        super().__init__("the server has begun something else")
        self.received = received


class Device:
    """Serves rounds until the run is finished or somebody asks it to stop."""

    def __init__(
        self, link: Link, images: Images, works: Mapping[str, ClientWork], device: str = "auto"
    ) -> None:
        self.rounds = 0
        """Rounds this client did its part of to the end."""
        self._link = link
        self._images = images
        self._works = {name: _Watched(work) for name, work in works.items()}
        self._device = device
        self._stopping = False
        self._member: Member | None = None
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

    def stop(self) -> None:
        """Finish the iteration at hand, then say goodbye."""
        self._stopping = True

    def serve(self) -> None:
        """Returns once the run is over or `stop` was called; raises `Rejected` if refused."""
        received: Received | None = None
        try:
            while True:
                received = received or self._receive()
                try:
                    self._handle(received)
                    received = None
                except Interrupted as interruption:
                    received = interruption.received
        except Stopped:
            pass
        finally:
            self._link.close()

    def _receive(self) -> Received:
        while not self._stopping and not self._link.over.is_set():
            received = self._link.receive(0.2)
            if received is not None:
                return received
        raise Stopped

    def _decode(self, received: Received) -> Frame | None:
        if received.stream is not self._stream:
            # Another connection: it starts with a welcome, whatever the last one was about.
            self._stream = received.stream
            self._expected = {"welcome": protocol.WELCOME}
        try:
            return decode(received.data, self._expected)
        except WireError as error:
            log.error("a frame of the server was passed over: %s", error)
            return None

    def _handle(self, received: Received) -> None:
        frame = self._decode(received)
        if frame is not None:
            self.acting(frame)
            self._steps[frame.kind](received, frame)

    def acting(self, frame: Frame) -> None:
        """Called before a frame is acted on; a harness breaks things here."""

    def _expect(self, expected: Mapping[str, Schema]) -> None:
        assert self._stream is not None
        self._expected = expected
        self._stream.assembler.limit = max(schema.limit for schema in expected.values())

    def _expect_round(self, **more: Schema) -> None:
        """A round may begin at any time: one that broke off is simply never mentioned again."""
        shapes = self.member.shapes
        self._expect(
            {
                "split": shapes.split(True),
                "split_alone": shapes.split(False),
                "full": protocol.FULL,
                **more,
            }
        )

    def _answer(
        self,
        received: Received,
        kind: str,
        fields: Mapping[str, Any],
        tensors: Mapping[str, Tensor] | None = None,
        codecs: Mapping[str, str] | str = "fp32",
    ) -> None:
        # Joined, that is copied: the tensors may be trained on before the last of them is sent.
        received.stream.answer(
            received.ticket, [b"".join(encode(kind, fields, tensors or {}, codecs))]
        )

    # --- joining ---------------------------------------------------------------------------------

    def _welcome(self, received: Received, frame: Frame) -> None:
        if self._member is None or self._member.run != frame.fields["run"]:
            terms = Terms.from_json(frame.fields["terms"])
            self._member = Member(terms, self._images, Hardware(self._device, terms.config.runtime))
            self._link.run = self._member.run
        member = self.member
        self._expect({"enrolled": protocol.ENROLLED})
        ready = {
            "model": member.shapes.digest,
            "images": len(member.images),
            "skipped": member.skipped,
        }
        self._answer(received, "ready", ready)

    def _enrolled(self, received: Received, frame: Frame) -> None:
        self.member.enrol(frame.fields["client"])
        log.info(
            "taking part as client %d with %d images", self.member.client, len(self.member.images)
        )
        self._expect_round()

    # --- split rounds ----------------------------------------------------------------------------

    def _split(self, received: Received, frame: Frame) -> None:
        member, fields = self.member, frame.fields
        states = separated(frame.tensors, ["bottom", "teacher"])
        member.plan = SplitRound(
            fields["round"],
            (member.client,),
            fields["steps"],
            fields["lr"],
            states["bottom"],
            states["teacher"] or states["bottom"],
            teacher_for=None if states["teacher"] else frozenset(),
            teacher_decay=fields["decay"] if fields["ema"] else None,
        )
        member.step = 0
        member.fleet.start_round(member.plan)
        self._expect_round(gradients=member.shapes.gradients())
        self._send_features(received)

    def _send_features(self, received: Received) -> None:
        member, wire = self.member, self.member.config.wire
        with member.hardware.arithmetic():
            features = member.fleet.forward()
        self._answer(
            received,
            "features",
            {"round": member.plan.index, "step": member.step},
            {"student": features.student.detach(), "teacher": features.teacher},
            {"student": wire.student_features, "teacher": wire.teacher_features},
        )

    def _gradients(self, received: Received, frame: Frame) -> None:
        member = self.member
        if (frame.fields["round"], frame.fields["step"]) != (member.plan.index, member.step):
            log.warning("gradients of another step were passed over")
            return
        with member.hardware.arithmetic():
            member.fleet.backward(frame.tensors["gradients"].to(member.hardware.device))
        member.step += 1
        if member.step < member.plan.steps:
            self._send_features(received)
            return
        self._expect_round()
        self.rounds += 1
        bottom = joined({"bottom": member.fleet.finish_round()})
        self._answer(
            received, "bottom", {"round": member.plan.index}, bottom, member.config.wire.models
        )

    # --- full-model rounds -----------------------------------------------------------------------

    def _full(self, received: Received, frame: Frame) -> None:
        fields = frame.fields
        work = self._works.get(fields["work"])
        if work is None:
            log.error(
                "the server asks for work %r; known here: %s",
                fields["work"],
                ", ".join(self._works),
            )
            return
        errand = _Errand(self, received, fields["round"])
        states = errand.download("accept", {}, fields["states"])
        plan = FullRound(
            fields["round"],
            (self.member.client,),
            fields["steps"],
            fields["lr"],
            send=states,
            on_request=_OnRequest(errand, fields["on_request"]),
            settings=fields["settings"],
        )
        work.errand = errand
        self.member.hold_whole_model()
        (result,) = self.member.fleet.train(work, plan)
        errand.upload(result.numbers, result.states)
        self.rounds += 1


class _Errand:
    """A full-model round's exchange with the server, one question and answer after another."""

    def __init__(self, device: Device, received: Received, round_index: int) -> None:
        self._device = device
        self._last = received
        self._round = round_index

    def _ask(self, kind: str, fields: Mapping[str, Any], reply: str, schema: Schema) -> Frame:
        device = self._device
        device._expect_round(**{reply: schema})
        device._answer(self._last, kind, {"round": self._round, **fields})
        while True:
            received = device._receive()
            if received.stream is not self._last.stream:
                raise Interrupted(received)
            frame = device._decode(received)
            if frame is None:
                continue
            if frame.kind != reply or frame.fields["round"] != self._round:
                raise Interrupted(received)
            device.acting(frame)
            self._last = received
            return frame

    def download(
        self, kind: str, fields: Mapping[str, Any], states: Mapping[str, list[str]]
    ) -> dict[str, State]:
        frame = self._ask(kind, fields, "states", self._device.member.shapes.states(states))
        device = self._device.member.hardware.device
        tensors = {name: tensor.to(device) for name, tensor in frame.tensors.items()}
        return separated(tensors, list(states))

    def upload(self, numbers: Mapping[str, float], states: Mapping[str, State]) -> None:
        device, done = self._device, {"numbers": dict(numbers), "states": outline(states)}
        if states:
            self._ask("done", done, "upload", protocol.UPLOAD)
            device._expect_round()
            codec = device.member.config.wire.models
            device._answer(self._last, "states", {"round": self._round}, joined(states), codec)
        else:
            device._expect_round()
            device._answer(self._last, "done", {"round": self._round, **done})

    def beat(self) -> None:
        """Between two steps: stop if asked to, else let the server know of the progress."""
        if self._device._stopping:
            raise Stopped
        self._last.stream.beat(self._last.ticket)


class _OnRequest(Mapping[str, State]):
    """States that are downloaded when they are looked at."""

    def __init__(self, errand: _Errand, states: Mapping[str, list[str]]) -> None:
        self._errand = errand
        self._states = states

    def __getitem__(self, name: str) -> State:
        return self._errand.download("fetch", {"name": name}, {name: self._states[name]})[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)


class _Watched:
    """A method's client half that tells the server after every step that it is at work."""

    errand: _Errand

    def __init__(self, work: ClientWork) -> None:
        self.name = work.name
        self._work = work

    def start(self, client: ClientRuntime) -> bool:
        return self._work.start(client)

    def step(self, client: ClientRuntime) -> None:
        self.errand.beat()
        self._work.step(client)

    def finish(self, client: ClientRuntime) -> tuple[dict[str, State], dict[str, float]]:
        return self._work.finish(client)
