"""Run the server's side of a full-model round, with every client at its own pace."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from semisfl.fleet.base import ClientResult, ClientWork, FullRound, State
from semisfl.fleet.byte_counts import Kind
from semisfl.fleet.packing import joined, separated, tensor_names
from semisfl.net import messages
from semisfl.net.chunks import Parts
from semisfl.net.frames import Frame, Schema, encode, payload_bytes
from semisfl.net.headers import WireError
from semisfl.net.messages import Schemas


@dataclass(frozen=True)
class Due:
    """Describe the expected answer: one of these frames, with these values in its fields."""

    frames: Mapping[str, Schema]
    fields: Mapping[str, Any]
    steps: int = 1
    """Steps of work before the answer; each may take `network.deadline`."""


Ask = Callable[[int, Parts, Mapping[Kind, int], Due], None]


class ServerFullRound:
    """Exchange the frames of a full-model round with each client: see `semisfl.net.messages`.

    An answer must match what the method's client half declares (`Answers`). Anything else is a
    WireError and never reaches the method.
    """

    def __init__(
        self, schemas: Schemas, work: ClientWork, plan: FullRound, device: torch.device, ask: Ask
    ) -> None:
        self.results: dict[int, ClientResult] = {}
        self._schemas, self._work, self._plan, self._device = schemas, work, plan, device
        self._ask_client = ask
        self._codec = schemas.config.wire.models
        self._outline = work.answers.outline(schemas.full)
        self._upload = schemas.states(self._outline)
        self._numbers: dict[int, dict[str, float]] = {}
        self._fetched: defaultdict[int, set[str]] = defaultdict(set)
        self._stages: Mapping[str, Callable[[int, Frame], None]] = {
            "accept": self._send_states,
            "fetch": self._send_fetched,
            "done": self._ask_upload,
            "states": self._take_upload,
        }

    def begin(self, client: int) -> None:
        plan = self._plan
        fields = {
            "round": plan.index,
            "steps": plan.steps,
            "lr": float(plan.lr),
            "work": self._work.name,
            # Devices take all settings from the terms and compare these; infinite numbers cross in no field.
            "settings": {k: v for k, v in plan.settings.items() if v not in (math.inf, -math.inf)},
            "states": tensor_names(plan.known_to(client)),
            "on_request": tensor_names(plan.on_request),
        }
        self._ask(client, encode("full", fields, {}), {}, {"accept": messages.ACCEPT})

    def go_on(self, client: int, frame: Frame) -> None:
        self._stages[frame.kind](client, frame)

    def _ask(
        self,
        client: int,
        frame: Parts,
        sizes: Mapping[Kind, int],
        expected: Mapping[str, Schema],
        steps: int = 1,
    ) -> None:
        self._ask_client(client, frame, sizes, Due(expected, {"round": self._plan.index}, steps))

    def _send(self, client: int, states: Mapping[str, State]) -> None:
        sizes: dict[Kind, int] = {}
        for name, state in states.items():
            kind = self._plan.kinds.get(name, "model")
            sizes[kind] = sizes.get(kind, 0) + payload_bytes(
                self._schemas.states(tensor_names({name: state}))
            )
        frame = encode("states", {"round": self._plan.index}, joined(states), self._codec)
        expected = {"done": messages.DONE}
        # A client keeps what it has fetched for the round: each state crosses at most once.
        if self._plan.on_request.keys() - self._fetched[client]:
            expected["fetch"] = messages.FETCH
        # The work may also process every image before its first step.
        self._ask(client, frame, sizes, expected, self._plan.steps + 1)

    def _send_states(self, client: int, _: Frame) -> None:
        # Clients keep nothing between rounds, so states in `held` are sent and counted again.
        self._send(client, self._plan.known_to(client))

    def _send_fetched(self, client: int, frame: Frame) -> None:
        name = frame.fields["name"]
        if name not in self._plan.on_request:
            raise WireError(f"it asks for state {name[:40]!r}, which this round does not have")
        if name in self._fetched[client]:
            raise WireError(f"it asks for state {name!r} again; it may ask once per round")
        self._fetched[client].add(name)
        self._send(client, {name: self._plan.on_request[name]})

    def _ask_upload(self, client: int, frame: Frame) -> None:
        numbers, announced = frame.fields["numbers"], frame.fields["states"]
        if self._work.answers.may_decline and not numbers and not announced:
            self.results[client] = ClientResult(client, {}, {})
            return
        self._numbers[client] = self._checked(numbers)
        if announced != self._outline:
            raise WireError(
                f"it announces states {str(announced)[:80]!r}; {self._work.name} answers "
                f"{', '.join(self._outline)}, whole"
            )
        upload = encode("upload", {"round": self._plan.index}, {})
        self._ask(client, upload, {}, {"states": self._upload})

    def _checked(self, numbers: Mapping[str, Any]) -> dict[str, float]:
        answers = self._work.answers
        if numbers.keys() != answers.numbers.keys():
            raise WireError(
                f"its numbers are {str(sorted(numbers))[:80]!r}; {self._work.name} answers "
                f"{', '.join(answers.numbers)}"
            )
        for name, value in numbers.items():
            if type(value) is not float or value != answers.within(name, value):
                least, greatest = answers.numbers[name]
                raise WireError(
                    f"its {name} is {str(value)[:40]!r}, not a float from {least:g} to {greatest:g}"
                )
        return dict(numbers)

    def _take_upload(self, client: int, frame: Frame) -> None:
        device = self._device
        states = {
            name: {key: tensor.to(device) for key, tensor in state.items()}
            for name, state in separated(frame.tensors, list(self._outline)).items()
        }
        self.results[client] = ClientResult(client, states, self._numbers[client])
