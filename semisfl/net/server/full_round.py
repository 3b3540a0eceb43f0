"""The server's side of a full-model round, with every client at its own pace; and what is believed."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from semisfl.fleet.base import ClientResult, ClientWork, FullRound, Kind, State
from semisfl.net import messages
from semisfl.net.chunks import Parts
from semisfl.net.frames import Frame, Schema, WireError, encode, payload_bytes
from semisfl.net.messages import Schemas, joined, outline, separated

Due = tuple[Mapping[str, Schema], Mapping[str, Any]]
"""The frames a client may answer with, and the values that their fields must have."""
Ask = Callable[[int, Parts, Mapping[Kind, int], Due], None]
LeaveOut = Callable[[int, str], None]

ABSURD = 1e6
"""No feature, weight or statistic of a working model is anywhere near this large."""


class ServerFullRound:
    """What `NetworkFleet.train` says to each client: see `semisfl.net.messages`."""

    def __init__(
        self,
        schemas: Schemas,
        work: ClientWork,
        plan: FullRound,
        device: torch.device,
        ask: Ask,
        leave_out: LeaveOut,
    ) -> None:
        self.results: dict[int, ClientResult] = {}
        self._shapes, self._work, self._plan, self._device = schemas, work, plan, device
        self._ask_client, self._leave_out = ask, leave_out
        self._codec = schemas.config.wire.models
        self._numbers: dict[int, dict[str, float]] = {}
        self._stages: Mapping[str, Callable[[int, Frame], None]] = {
            "accept": self._send_states,
            "fetch": self._send_fetched,
            "done": self._ask_upload,
            "states": self._take_upload,
        }

    def _states(self, client: int) -> dict[str, State]:
        # Clients keep nothing between rounds: what they should still hold is sent, and counted, again.
        plan = self._plan
        return {**plan.send, **plan.held.get(client, {}), **plan.send_to.get(client, {})}

    def begin(self, client: int) -> None:
        plan = self._plan
        fields = {
            "round": plan.index,
            "steps": plan.steps,
            "lr": float(plan.lr),
            "work": self._work.name,
            "settings": dict(plan.settings),
            "states": outline(self._states(client)),
            "on_request": outline(plan.on_request),
        }
        self._ask(client, encode("full", fields, {}), {}, {"accept": messages.ACCEPT})

    def go_on(self, client: int, frame: Frame) -> None:
        self._stages[frame.kind](client, frame)

    def _ask(
        self, client: int, frame: Parts, sizes: Mapping[Kind, int], expected: Mapping[str, Schema]
    ) -> None:
        self._ask_client(client, frame, sizes, (expected, {"round": self._plan.index}))

    def _send(self, client: int, states: Mapping[str, State]) -> None:
        sizes: dict[Kind, int] = {}
        for name, state in states.items():
            kind = self._plan.kinds.get(name, "model")
            sizes[kind] = sizes.get(kind, 0) + payload_bytes(
                self._shapes.states(outline({name: state}))
            )
        frame = encode("states", {"round": self._plan.index}, joined(states), self._codec)
        expected = {"done": messages.DONE} | (
            {"fetch": messages.FETCH} if self._plan.on_request else {}
        )
        self._ask(client, frame, sizes, expected)

    def _send_states(self, client: int, _: Frame) -> None:
        self._send(client, self._states(client))

    def _send_fetched(self, client: int, frame: Frame) -> None:
        name = frame.fields["name"]
        if name not in self._plan.on_request:
            self._leave_out(
                client, f"it asks for state {name[:40]!r}, which this round does not have"
            )
            return
        self._send(client, {name: self._plan.on_request[name]})

    def _ask_upload(self, client: int, frame: Frame) -> None:
        numbers = frame.fields["numbers"]
        if not all(type(value) in (int, float) for value in numbers.values()):
            self._leave_out(client, "its numbers are not numbers")
            return
        self._numbers[client] = {name: float(value) for name, value in numbers.items()}
        if not frame.fields["states"]:
            self.results[client] = ClientResult(client, {}, self._numbers[client])
            return
        try:
            schema = self._shapes.states(frame.fields["states"])
        except WireError as error:
            self._leave_out(client, str(error))
            return
        upload = encode("upload", {"round": self._plan.index}, {})
        self._ask(client, upload, {}, {"states": schema})

    def _take_upload(self, client: int, frame: Frame) -> None:
        names = list(dict.fromkeys(path.partition("/")[0] for path in frame.tensors))
        device = self._device
        states = {
            name: {key: tensor.to(device) for key, tensor in state.items()}
            for name, state in separated(frame.tensors, names).items()
        }
        self.results[client] = ClientResult(client, states, self._numbers[client])


def unbelievable(tensors: Mapping[str, Tensor]) -> str | None:
    """What is wrong with values that came from a client; None if they may be used."""
    for name, tensor in tensors.items():
        if not tensor.numel():
            continue
        low, high = (float(value) for value in tensor.aminmax())
        # Comparisons with NaN are false, so this catches NaN too.
        if not (low >= -ABSURD and high <= ABSURD):
            return (
                f"{name} runs from {low:g} to {high:g}; at most {ABSURD:g} either way is believed"
            )
        if name.endswith(("running_var", "num_batches_tracked")) and low < 0:
            return f"{name} goes down to {low:g}; it cannot be negative"
    return None
