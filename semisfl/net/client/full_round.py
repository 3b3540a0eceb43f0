"""A device's side of a full-model round: it receives the states that it needs, trains, and uploads its result.

The frame that begins the round announces states (whole models, or parts of them): those that follow it at once, and
those that a method may never need, which the device fetches when the method first reads them. A device that the
server no longer waits for notices it by a frame that begins something else (`Interrupted`).
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from semisfl.fleet.base import ClientWork, FullRound, State
from semisfl.fleet.packing import join_states, split_states
from semisfl.net.client.agreement import full_settings
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
        """Take part in round ``round_index``, which the frame ``received`` begins."""
        self._device = device
        self._last = received
        self._round = round_index

    def train(self, work: ClientWork, fields: Mapping[str, Any]) -> None:
        """Do ``work`` as the frame with ``fields`` asks, and upload its result.

        Raises `Interrupted` if the server has gone on without this client.
        """
        member = self._device.member
        states = self._download(fields["states"])
        plan = FullRound(
            fields["round"],
            (member.client,),
            fields["steps"],
            fields["lr"],
            send=states,
            on_request=OnRequest(self, fields["on_request"]),
            settings=full_settings(member.config),
        )
        (result,) = member.block.train(work, plan, between=self._beat)
        # Frames carry finite numbers only: a NaN loss is sent as the largest allowed value, so that
        # the server notices it.
        numbers = {name: work.answers.within(name, value) for name, value in result.numbers.items()}
        self._upload(numbers, result.states)

    def fetch(self, name: str, keys: list[str]) -> State:
        """Ask the server for the state ``name``, whose tensors are ``keys``, and return it."""
        self._device.answer(self._last, "fetch", {"round": self._round, "name": name})
        return self._download({name: keys})[name]

    def _download(self, states: Mapping[str, list[str]]) -> dict[str, State]:
        """Return ``states`` (state -> names of its tensors), which are the server's next frame."""
        frame = self._next(self._device.member.schemas.states(states))
        device = self._device.member.hardware.device
        tensors = {name: tensor.to(device) for name, tensor in frame.tensors.items()}
        return split_states(tensors, list(states))

    def _upload(self, numbers: Mapping[str, float], states: Mapping[str, State]) -> None:
        """Send the result of the round, or that there is nothing to add."""
        device = self._device
        device.expect_round()
        if not states:
            return device.answer(self._last, "declined", {"round": self._round})
        codec, models = (
            device.member.config.wire.models,
            device.outgoing.models(join_states(states)),
        )
        fields = {"round": self._round, "numbers": dict(numbers)}
        return device.answer(self._last, "states", fields, models, codec)

    def _next(self, schema: Schema) -> Frame:
        """Return the round's next frame, of states; raise `Interrupted` if another round begins instead."""
        device = self._device
        device.expect_round(states=schema)
        while True:
            received = device.receive()
            if received.stream is not self._last.stream:
                raise Interrupted(received)
            frame = device.decode(received)
            if frame is None:
                continue
            if frame.kind != "states" or frame.fields["round"] != self._round:
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
        return self._full_round.fetch(name, self._states[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)
