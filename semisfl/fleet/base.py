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
from semisfl.engine.weights import State as State
from semisfl.fleet.byte_counts import Kind, Traffic
from semisfl.fleet.client_half import Answers as Answers
from semisfl.fleet.client_half import ClientRuntime as ClientRuntime
from semisfl.fleet.client_half import ClientWork as ClientWork
from semisfl.fleet.client_half import Regularisers as Regularisers
from semisfl.fleet.client_half import every_tensor as every_tensor
from semisfl.fleet.held_back import HeldBack


@dataclass(frozen=True)
class SplitRound:
    """What the server tells its clients at the start of a split round."""

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
    """Who is expected in the round after this one, so that an engine may prepare for them."""


@dataclass(frozen=True)
class Features:
    """One step's features of every client that answered, concatenated in the order of ``clients``."""

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
        """For each row, the position in ``clients`` of the client it came from."""
        positions = torch.arange(len(self.clients), device=self.student.device)
        return positions.repeat_interleave(self.batch)


@dataclass(frozen=True)
class FullRound:
    """What the server tells its clients at the start of a full-model round."""

    index: int
    active: tuple[int, ...]
    steps: int
    lr: float
    send: Mapping[str, State]
    """Named states every active client receives, e.g. ``{"student": ...}``."""
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    """How each named state is counted; ``model`` unless said."""
    on_request: Mapping[str, State] = field(default_factory=dict)
    """States a client downloads only if its work asks for them (`ClientRuntime.fetch`)."""
    send_to: Mapping[int, Mapping[str, State]] = field(default_factory=dict)
    """Further states for single clients."""
    held: Mapping[int, Mapping[str, State]] = field(default_factory=dict)
    """States single clients were sent earlier and still hold: `received` gives them, uncounted.
    Over a network, where clients keep nothing between rounds, they are sent and counted again."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Plain values the client half reads."""


@dataclass(frozen=True)
class ClientResult:
    """What one client answered: named states, plain numbers; ``states`` empty if it had nothing."""

    client: int
    states: Mapping[str, State]
    numbers: Mapping[str, float]


class RoundAborted(Exception):
    """Too few clients are left: the run repeats the round from its start when enough are back."""


class Fleet(Protocol):
    """The clients, as a method sees them. It is made of a `FleetSetup`, then opened, then closed."""

    traffic: Traffic
    capturable: bool
    """Whether a step may be captured and replayed (clients in this process, on a GPU)."""
    held_back: HeldBack
    """Whose part in the round at hand was limited, by whom ever."""

    def open(self, directory: Path | None) -> None:
        """Let clients in. What must outlast this process goes to the run's ``directory``."""
        ...

    def close(self, finished: bool) -> None:
        """The end: of the run if ``finished``, else of this process, and clients wait for another."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a restarted run must know of its clients; traffic is saved by itself."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def image_counts(self) -> Mapping[int, int]:
        """Return how many images each client holds, of all that were ever here."""
        ...

    def present(self) -> Sequence[int]:
        """Return the clients that are there."""
        ...

    def wait_ready(self) -> None:
        """Return once enough clients are there for a round."""
        ...

    def start_round(self, plan: SplitRound) -> None: ...

    def forward(self) -> Features: ...

    def backward(self, gradients: Tensor) -> None:
        """Each client back-propagates its rows and takes one step."""
        ...

    def finish_round(self) -> State:
        """Return the bottoms of the remaining clients as one, by the rule of ``robust.aggregate``."""
        ...

    def train(self, work: ClientWork, plan: FullRound) -> list[ClientResult]: ...

    def settle(self, good: bool) -> str | None:
        """The round is over, and will be undone unless it was ``good``. If a client stood out in a
        bad one, it is left out of the repetition; its name."""
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
        name: torch.stack(
            [
                state[name].double() if not first.is_floating_point() else state[name]
                for state in states
            ]
        )
        .mean(0)
        .to(first.dtype)
        for name, first in states[0].items()
    }
