"""Define what a method may ask of its clients, wherever they live.

A *split* round is ``start_round``, then ``forward`` / ``backward`` once per step, then
``finish_round``. A *full-model* round is one call of ``train``: every client runs the method's
client half (`ClientWork`) and answers with tensors. Clients may fail to answer: what comes back
names those who did, and everything downstream follows from that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from semisfl import seeds
from semisfl.engine.sums import Regularisers as Regularisers
from semisfl.engine.weights import State as State
from semisfl.fleet.byte_counts import Kind, Traffic
from semisfl.fleet.client_half import Answers as Answers
from semisfl.fleet.client_half import ClientRuntime as ClientRuntime
from semisfl.fleet.client_half import ClientWork as ClientWork
from semisfl.fleet.client_half import every_tensor as every_tensor
from semisfl.fleet.held_back import HeldBack
from semisfl.models.stack import mean_of_rows


@dataclass(frozen=True)
class SplitRound:
    """Describe a split round, as the server sends it to its clients."""

    index: int
    active: tuple[int, ...]
    steps: int
    lr: float
    bottom: State
    teacher_bottom: State
    teacher_for: frozenset[int] | None = None
    """Clients whose weak features come from the teacher bottom; the others use their student
    bottom and are sent no teacher. None: everyone is sent the teacher."""
    teacher_decay: float | None = None
    """EMA of the teacher bottom on the client after each of its steps; None: frozen."""
    next_active: tuple[int, ...] = ()
    """Clients expected in the next round, so that an engine can prepare for them."""


@dataclass(frozen=True)
class Features:
    """Hold one step's features of every client that answered, in the order of ``clients``."""

    student: Tensor
    teacher: Tensor
    clients: tuple[int, ...]
    truth: Tensor | None = None
    """True labels where a simulation knows them (-1 elsewhere): for statistics only."""

    @property
    def batch(self) -> int:
        return self.student.shape[0] // len(self.clients)

    @property
    def owner(self) -> Tensor:
        """Return for each row the position in ``clients`` of the client it came from."""
        positions = torch.arange(len(self.clients), device=self.student.device)
        return positions.repeat_interleave(self.batch)


@dataclass(frozen=True)
class FullRound:
    """Describe a full-model round, as the server sends it to its clients."""

    index: int
    active: tuple[int, ...]
    steps: int
    lr: float
    send: Mapping[str, State]
    """Named states every active client receives, e.g. ``{"student": ...}``."""
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    """How the traffic of each named state is counted; ``model`` by default."""
    on_request: Mapping[str, State] = field(default_factory=dict)
    """States a client downloads only if its work asks for them (`ClientRuntime.fetch`)."""
    send_to: Mapping[int, Mapping[str, State]] = field(default_factory=dict)
    """Further states for single clients."""
    held: Mapping[int, Mapping[str, State]] = field(default_factory=dict)
    """States single clients were sent earlier and still hold: `received` gives them, uncounted.
    Over a network, where clients keep nothing between rounds, they are sent and counted again."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Plain values the client half reads."""

    def known_to(self, client: int) -> dict[str, State]:
        """Return the states that ``client`` has without asking for one."""
        return {**self.send, **self.held.get(client, {}), **self.send_to.get(client, {})}


@dataclass(frozen=True)
class ClientResult:
    """Hold one client's answer: named states and plain numbers; no states if it had nothing to add."""

    client: int
    states: Mapping[str, State]
    numbers: Mapping[str, float]


class RoundAborted(Exception):
    """Raised when too few clients are left. The run repeats the round once enough are back."""


class AbnormalValues(RoundAborted):
    """Raised when the server itself computed values that no client can use. Waiting does not help."""


class Fleet(Protocol):
    """Give a method access to its clients. Made from a `FleetSetup`, then opened, then closed."""

    traffic: Traffic
    capturable: bool
    """Whether a step may be captured and replayed (clients in this process, on a GPU)."""
    held_back: HeldBack
    """Clients whose influence was limited in the current round, and why."""

    def open(self, directory: Path | None) -> None:
        """Let clients in. Write what must outlast this process to the run's ``directory``."""
        ...

    def close(self, finished: bool) -> None:
        """End the run if ``finished``; else end this process only, and clients wait for the next one."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what a restarted run must know about its clients; traffic is saved separately."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def image_counts(self) -> Mapping[int, int]:
        """Return how many images each client holds, of all that were ever here."""
        ...

    def present(self) -> Sequence[int]:
        """Return the clients that are there."""
        ...

    def members(self) -> Mapping[int, str]:
        """Return the clients that are there or may come back, each with its name.

        Those that were removed or shut out are not among them. A client with another name is another one.
        """
        ...

    def wait_ready(self) -> None:
        """Return once enough clients are there for a round."""
        ...

    def start_round(self, plan: SplitRound) -> None: ...

    def forward(self) -> Features: ...

    def backward(self, gradients: Tensor) -> None:
        """Let each client back-propagate its rows and take one step."""
        ...

    def finish_round(self) -> State:
        """Return the bottoms of the remaining clients as one, by the rule of ``robust.aggregate``."""
        ...

    def train(self, work: ClientWork, plan: FullRound) -> list[ClientResult]: ...

    def settle(self, good: bool) -> str | None:
        """End the round. If it was not ``good``, return the client to exclude from its retry.

        None: nobody stands out.
        """
        ...


def draw_active(
    seed: int, round_index: int, total: int, present: Sequence[int], count: int
) -> tuple[int, ...]:
    """Draw ``count`` clients uniformly without replacement; the next in line replaces an absent one."""
    order = seeds.generator(seed, "active", round_index).permutation(total)
    there = set(present)
    return tuple(sorted([int(client) for client in order if int(client) in there][:count]))


def mean_state(states: Sequence[State]) -> State:
    """Return the plain mean of parameters and buffers; integer counters are averaged and truncated."""
    return {
        name: mean_of_rows(torch.stack([state[name] for state in states])) for name in states[0]
    }
