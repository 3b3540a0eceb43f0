"""Define what a method may ask of its clients, wherever they live.

A *split* round is ``start_round``, then ``forward`` / ``backward`` once per step, then
``finish_round``. A *full-model* round is one call of ``train``: every client runs the method's
client half (`ClientWork`) and answers with tensors. Clients may fail to answer: what comes back
names those who did, and everything downstream follows from that.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from semisfl import seeds
from semisfl.data.batches import ViewKind
from semisfl.engine.sums import UNREGULARISED
from semisfl.engine.sums import Regularisers as Regularisers
from semisfl.engine.weights import State as State
from semisfl.fleet.byte_counts import Kind, Traffic
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


def every_tensor(name: str) -> bool:
    """Return True: a state of `Answers.states` that is a whole model."""
    return True


@dataclass(frozen=True)
class Answers:
    """All that a method's client half ever answers with.

    A server that cannot trust its clients takes exactly this and nothing else: the method's server
    half may rely on every state, tensor and number being there.
    """

    states: Mapping[str, Callable[[str], bool]]
    """Named states, and by name which of a full model's tensors each holds."""
    numbers: Mapping[str, tuple[float, float]]
    """Named numbers, with the least and the greatest that each can be."""
    may_decline: bool = False
    """Whether a client may have nothing to contribute: then it answers no state and no number."""

    def outline(self, tensors: Iterable[str]) -> dict[str, list[str]]:
        """Return for each state which of a full model's ``tensors`` it holds."""
        names = sorted(tensors)
        return {state: list(filter(holds, names)) for state, holds in self.states.items()}

    def within(self, name: str, value: float) -> float:
        """Return ``value`` within the bounds of ``name``; NaN becomes the greatest."""
        least, greatest = self.numbers[name]
        return greatest if math.isnan(value) else min(max(value, least), greatest)


class ClientRuntime(Protocol):
    """What a method's client half may use; the same on a device and in a simulation.

    ``step`` must be free of host decisions that change between rounds (it may be captured once
    and replayed, for all clients together); anything it needs from ``start`` it gets through
    ``set_buffer``, also for a client that turns out to contribute nothing.
    """

    client: int
    round_index: int
    steps: int
    batch: int
    count: int
    """Images this client holds."""
    classes: int
    settings: Mapping[str, Any]
    device: torch.device
    lr: Tensor

    def model(self, name: str) -> nn.Module:
        """A full model of this client's own called ``name``; its weights are what was last loaded."""
        ...

    def sum_model(self, name: str, fixed: str, learned: str, names: Sequence[str]) -> nn.Module:
        """The model ``name`` becomes the sum of two others in the parameters ``names``.

        The rest of its parameters it shares with ``fixed``, its buffers with ``learned``: only the
        latter is stepped where the sum is descended. To be called whenever one of them was loaded.
        """
        ...

    def received(self, name: str) -> State | None:
        """A state sent at the round's start, or None if this client was not sent it."""
        ...

    def fetch(self, name: str) -> State:
        """Download a state of ``FullRound.on_request`` now (counted)."""
        ...

    def rng(self, purpose: str) -> np.random.Generator:
        """Host draws of this client, this round, this purpose."""
        ...

    def generator(self) -> torch.Generator:
        """Device draws (dropout) of this client this round."""
        ...

    def images(self, view: ViewKind, batch: int) -> Iterator[Tensor]:
        """One ``view`` of every local image, normalised, at most ``batch`` at a time."""
        ...

    def predict(self, model: nn.Module, view: ViewKind) -> Tensor:
        """Softmax of ``model`` in eval mode on one ``view`` ("weak" or "plain") of every local image."""
        ...

    def draw_view(self, name: str, view: ViewKind, indices: np.ndarray) -> None:
        """``view`` ("weak", "strong", "plain") of local images ``indices`` [steps, batch], for ``batch_of``."""
        ...

    def batch_of(self, name: str) -> Tensor:
        """This step's normalised images of a planned view."""
        ...

    def truth(self, indices: np.ndarray) -> Tensor:
        """True labels of local images where a simulation knows them; -1 elsewhere, as on every
        device. For statistics only."""
        ...

    def set_buffer(self, name: str, value: Tensor) -> Tensor:
        """Copy ``value`` to the buffer ``name``, which keeps its address between rounds."""
        ...

    def buffer(self, name: str) -> Tensor: ...

    def buffer_step(self, name: str) -> Tensor:
        """Return the current step's row of a buffer [steps, ...]."""
        ...

    def descend(
        self,
        model: nn.Module,
        loss: Tensor,
        clip_norm: float | None = None,
        regularisers: Regularisers = UNREGULARISED,
    ) -> None:
        """One SGD step of ``model`` on ``loss``, with this round's rate and the run's momentum.

        ``regularisers`` of a sum are descended too.
        """
        ...


class ClientWork(Protocol):
    """A method's client half.

    ``only_called`` names models, as in ``("student", "helper*")``, that it calls, loads, descends and
    averages and whose parameters it touches in no other way: their layers may compute on copies of
    lower precision.
    """

    name: str

    @property
    def answers(self) -> Answers:
        """What `finish` returns, declared beforehand."""
        ...

    def start(self, client: ClientRuntime) -> bool:
        """Prepare the round; False: this client has nothing to contribute."""
        ...

    def step(self, client: ClientRuntime) -> None: ...

    def finish(self, client: ClientRuntime) -> tuple[dict[str, State], dict[str, float]]:
        """Named states to upload (counted as ``model``) and plain numbers."""
        ...


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
