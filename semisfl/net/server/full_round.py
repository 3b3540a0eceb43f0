"""The server's side of a full-model round, with every client at its own pace.

A client is sent the states that its work starts from. Its answer is a result, or that it has nothing to add, or a
request for one more state, which is the next question. So clients need not wait for each other.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from semisfl.fleet.base import ClientResult, ClientWork, FullRound, State
from semisfl.fleet.byte_counts import Kind
from semisfl.fleet.packing import join_states, split_states, tensor_names
from semisfl.net import messages
from semisfl.net.frames import Frame, Schema, WireError, encode, payload_bytes
from semisfl.net.messages import Schemas
from semisfl.net.server.questions import Due, Questions


class ServerFullRound:
    """Exchange the frames of a full-model round with each client: see `semisfl.net.messages`.

    A result must match what the method's client half declares (`Answers`). Anything else is a
    `WireError` and never reaches the method.
    """

    def __init__(
        self,
        schemas: Schemas,
        work: ClientWork,
        plan: FullRound,
        device: torch.device,
        questions: Questions,
    ) -> None:
        """Take the ``plan`` of a round of ``work``, and the ``device`` that results are moved to."""
        self.results: dict[int, ClientResult] = {}
        """The result of each client that has answered."""
        self._schemas, self._work, self._plan, self._device = schemas, work, plan, device
        self._questions = questions
        self._outline = work.answers.outline(schemas.full)
        self._fetched: defaultdict[int, set[str]] = defaultdict(set)

    def begin(self, client: int) -> None:
        """Send ``client`` all states that it starts from, and await its result."""
        plan = self._plan
        # Clients keep nothing between rounds, so states in `held` are sent and counted again.
        states = plan.known_to(client)
        fields = {
            "round": plan.index,
            "steps": plan.steps,
            "lr": float(plan.lr),
            "work": self._work.name,
            # Devices take all settings from the terms and compare these; no field holds an infinite number.
            "settings": {k: v for k, v in plan.settings.items() if v not in (math.inf, -math.inf)},
            "states": tensor_names(states),
            "on_request": tensor_names(plan.on_request),
        }
        self._send(client, states, b"".join(encode("full", fields, {})))

    def _send(self, client: int, states: Mapping[str, State], *before: bytes) -> None:
        """Send ``states`` after the frames ``before``, and await a result, a refusal, or a request for a state."""
        sizes: dict[Kind, int] = {}
        for name, state in states.items():
            kind = self._plan.kinds.get(name, "model")
            size = payload_bytes(self._schemas.states(tensor_names({name: state})))
            sizes[kind] = sizes.get(kind, 0) + size
        about = {"round": self._plan.index}
        frame = encode("states", about, join_states(states), self._schemas.config.wire.models)
        expected: dict[str, Schema] = {"states": self._schemas.result(self._outline)}
        if self._work.answers.may_decline:
            expected["declined"] = messages.DECLINED
        # A client keeps what it has fetched for the round: each state is sent at most once.
        if self._plan.on_request.keys() - self._fetched[client]:
            expected["fetch"] = messages.FETCH
        self._questions.ask(client, [*before, b"".join(frame)], sizes, Due(expected, about))

    def go_on(self, client: int, frame: Frame) -> None:
        """Take an answer of ``client``: a request for a state, its result, or that it has nothing to add."""
        if frame.kind == "fetch":
            self._send_fetched(client, frame.fields["name"])
        elif frame.kind == "declined":
            self.results[client] = ClientResult(client, {}, {})
        else:
            numbers = self._checked(frame.fields["numbers"])
            tensors = {name: tensor.to(self._device) for name, tensor in frame.tensors.items()}
            states = split_states(tensors, list(self._outline))
            self.results[client] = ClientResult(client, states, numbers)

    def _send_fetched(self, client: int, name: str) -> None:
        """Send the state ``name``, which the client asks for; raise `WireError` if it may not."""
        if name not in self._plan.on_request or name in self._fetched[client]:
            raise WireError(
                f"it asks for state {name[:40]!r}, which is not here or was sent before"
            )
        self._fetched[client].add(name)
        self._send(client, {name: self._plan.on_request[name]})

    def _checked(self, numbers: Mapping[str, Any]) -> dict[str, float]:
        """Return a result's numbers; raise `WireError` unless each is one that the work answers, in its range."""
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
