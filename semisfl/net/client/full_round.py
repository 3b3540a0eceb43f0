"""A device's side of a full-model round: it asks for the states that it needs, trains, and uploads its result."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from semisfl.fleet.base import ClientWork, FullRound, State
from semisfl.fleet.packing import joined, separated, tensor_names
from semisfl.net import messages
from semisfl.net.client.agreement import check_weights, full_settings
from semisfl.net.client.connection import Received
from semisfl.net.frames import Frame, Schema

if TYPE_CHECKING:
    from semisfl.net.client.device import Device


class Interrupted(Exception):
    """Raised when the server has gone on without this client; holds its next question."""

    def __init__(self, received: Received) -> None:
        super().__init__("the server has begun something else")
        self.received = received


class ClientFullRound:
    """Exchange states with the server during one full-model round."""

    def __init__(self, device: "Device", received: Received, round_index: int) -> None:
        self._device = device
        self._last = received
        self._round = round_index

    def train(self, work: ClientWork, fields: Mapping[str, Any]) -> None:
        """Do ``work`` as the frame with ``fields`` asks, and upload its result."""
        member = self._device.member
        states = self.download("accept", {}, fields["states"])
        plan = FullRound(
            fields["round"],
            (member.client,),
            fields["steps"],
            fields["lr"],
            send=states,
            on_request=OnRequest(self, fields["on_request"]),
            settings=full_settings(member.config),
        )
        member.hold_whole_model()
        (result,) = member.block.train(work, plan, between=self._beat)
        # Frames carry finite numbers only: a NaN loss is sent as the largest allowed value, so that
        # the server notices it.
        numbers = {name: work.answers.within(name, value) for name, value in result.numbers.items()}
        self._upload(numbers, result.states)

    def download(
        self, kind: str, fields: Mapping[str, Any], states: Mapping[str, list[str]]
    ) -> dict[str, State]:
        """Ask for ``states`` (state -> names of its tensors) by a frame of this ``kind``; return them."""
        frame = self._ask(kind, fields, "states", self._device.member.schemas.states(states))
        check_weights(frame.tensors)
        device = self._device.member.hardware.device
        tensors = {name: tensor.to(device) for name, tensor in frame.tensors.items()}
        return separated(tensors, list(states))

    def _upload(self, numbers: Mapping[str, float], states: Mapping[str, State]) -> None:
        device, done = self._device, {"numbers": dict(numbers), "states": tensor_names(states)}
        if not states:
            device.expect_round()
            device.answer(self._last, "done", {"round": self._round, **done})
            return
        self._ask("done", done, "upload", messages.UPLOAD)
        device.expect_round()
        codec, models = device.member.config.wire.models, device.outgoing.models(joined(states))
        device.answer(self._last, "states", {"round": self._round}, models, codec)

    def _ask(self, kind: str, fields: Mapping[str, Any], reply: str, schema: Schema) -> Frame:
        """Answer the last frame with one of this ``kind`` and return the ``reply``; raise `Interrupted` for another."""
        device = self._device
        device.expect_round(**{reply: schema})
        device.answer(self._last, kind, {"round": self._round, **fields})
        while True:
            received = device.receive()
            if received.stream is not self._last.stream:
                raise Interrupted(received)
            frame = device.decode(received)
            if frame is None:
                continue
            if frame.kind != reply or frame.fields["round"] != self._round:
                raise Interrupted(received)
            self._last = received
            return frame

    def _beat(self) -> None:
        """Report progress to the server between two steps."""
        self._last.stream.beat(self._last.ticket)


class OnRequest(Mapping[str, State]):
    """Map names to states; download a state when it is first read."""

    def __init__(self, full_round: ClientFullRound, states: Mapping[str, list[str]]) -> None:
        self._full_round = full_round
        self._states = states

    def __getitem__(self, name: str) -> State:
        return self._full_round.download("fetch", {"name": name}, {name: self._states[name]})[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)
