"""Run a client's side of a full-model round: one question to the server after another."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from semisfl.fleet.base import ClientWork, FullRound, State
from semisfl.fleet.packing import joined, separated, tensor_names
from semisfl.net import messages
from semisfl.net.client.agreement import check_weights, full_settings
from semisfl.net.client.frame_io import FrameIO
from semisfl.net.client.rejection import Rejected
from semisfl.net.client.stream import Received
from semisfl.net.frames import Frame, Schema
from semisfl.settings.policy import PolicyBreach

OWN_FAULTS = (
    *(OSError, MemoryError, torch.OutOfMemoryError),
    getattr(torch, "AcceleratorError", MemoryError),  # torch 2.7 has none
)
"""Failures of the device itself, not of what a server sent."""


class Interrupted(Exception):
    """Raised when the server has gone on without this client; holds its next question."""

    def __init__(self, received: Received) -> None:
        super().__init__("the server has begun something else")
        self.received = received


class ClientFullRound:
    """Exchange states with the server during a full-model round."""

    def __init__(self, frames: FrameIO, received: Received, round_index: int) -> None:
        self._frames = frames
        self._last = received
        self._round = round_index

    def train(self, work: ClientWork, fields: Mapping[str, Any]) -> None:
        """Do ``work`` as the frame with ``fields`` asks, and upload its result."""
        member = self._frames.member
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
        with refusing():
            (result,) = member.block.train(work, plan, between=self.beat)
        # Frames carry finite numbers only: a NaN loss is sent as the largest allowed value, so that
        # the server notices it.
        numbers = {name: work.answers.within(name, value) for name, value in result.numbers.items()}
        self.upload(numbers, result.states)

    def _ask(self, kind: str, fields: Mapping[str, Any], reply: str, schema: Schema) -> Frame:
        frames = self._frames
        frames.expect_round(**{reply: schema})
        frames.answer(self._last, kind, {"round": self._round, **fields})
        while True:
            received = frames.receive()
            if received.stream is not self._last.stream:
                raise Interrupted(received)
            frame = frames.decode(received)
            if frame is None:
                continue
            if frame.kind != reply or frame.fields["round"] != self._round:
                raise Interrupted(received)
            self._last = received
            return frame

    def download(
        self, kind: str, fields: Mapping[str, Any], states: Mapping[str, list[str]]
    ) -> dict[str, State]:
        frame = self._ask(kind, fields, "states", self._frames.member.schemas.states(states))
        check_weights(frame.tensors)
        device = self._frames.member.hardware.device
        tensors = {name: tensor.to(device) for name, tensor in frame.tensors.items()}
        return separated(tensors, list(states))

    def upload(self, numbers: Mapping[str, float], states: Mapping[str, State]) -> None:
        frames, done = self._frames, {"numbers": dict(numbers), "states": tensor_names(states)}
        if states:
            self._ask("done", done, "upload", messages.UPLOAD)
            frames.expect_round()
            codec = frames.member.config.wire.models
            models = frames.outgoing.models(joined(states))
            frames.answer(self._last, "states", {"round": self._round}, models, codec)
        else:
            frames.expect_round()
            frames.answer(self._last, "done", {"round": self._round, **done})

    def beat(self) -> None:
        """Report progress to the server between two steps."""
        self._last.stream.beat(self._last.ticket)


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Raise `PolicyBreach` if the block fails on what the server sent: after a restart it would again."""
    try:
        yield
    except (Interrupted, PolicyBreach, Rejected, *OWN_FAULTS):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise PolicyBreach(
            f"the server's round cannot be done: {type(error).__name__}: {reason:.200}"
        ) from error


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
