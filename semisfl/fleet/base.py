"""Define what a method may ask of its clients, wherever they live.

A *split* round is ``start_round``, then ``forward`` / ``backward`` once per step, then
``finish_round``. A *full-model* round is one call of ``train``: every client runs the method's
client half (`ClientWork`) and answers with tensors. Clients may fail to answer: what comes back
names those who did, and everything downstream follows from that.
"""

import logging
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
from semisfl.engine.sums import UNREGULARISED, Regularisers as Regularisers
from semisfl.engine.weights import State as State
from semisfl.fleet.byte_counts import Kind, Traffic
from semisfl.models.stack import mean_of_rows

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SplitRound:
    """A split round, as the server sends it to its clients.

    ``index``: the round's number from 0. ``active``: its clients, sorted. ``steps``: the number of steps,
    each with one forward and one backward. ``lr``: the learning rate of all of them.
    """

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
    """One step's features of every client that answered, in the order of ``clients``.

    ``student`` and ``teacher`` are [clients x batch, features]: equal numbers of rows per client, side by
    side. ``student`` is a leaf that requires a gradient, so that `Fleet.backward` can be given its gradient.
    """

    student: Tensor
    teacher: Tensor
    clients: tuple[int, ...]
    truth: Tensor | None = None
    """True labels where a simulation knows them (-1 elsewhere): for statistics only."""

    @property
    def batch(self) -> int:
        """Return the number of rows per client."""
        return self.student.shape[0] // len(self.clients)

    @property
    def owner(self) -> Tensor:
        """Return for each row the position in ``clients`` of the client it came from."""
        positions = torch.arange(len(self.clients), device=self.student.device)
        return positions.repeat_interleave(self.batch)


@dataclass(frozen=True)
class FullRound:
    """A full-model round, as the server sends it to its clients; ``index`` ... ``lr`` as in `SplitRound`."""

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
    """One client's answer: named states and plain numbers; no states if it had nothing to contribute."""

    client: int
    states: Mapping[str, State]
    numbers: Mapping[str, float]


class RoundAborted(Exception):
    """Raised when too few clients are left. The run repeats the round once enough are back."""


class AbnormalValues(RoundAborted):
    """Raised when the server itself computed values that no client can use. Waiting does not help."""


# --- a method's client half -----------------------------------------------------------------------------


def every_tensor(name: str) -> bool:
    """Return True; for a state in `Answers.states` that is a whole model."""
    return True


@dataclass(frozen=True)
class Answers:
    """Declare everything that a method's client half answers.

    A server does not trust its clients: it accepts exactly this. The method's server half can rely
    on every state, tensor and number being there.
    """

    states: Mapping[str, Callable[[str], bool]]
    """Each named state with a test for the names of a full model's tensors that it holds."""
    numbers: Mapping[str, tuple[float, float]]
    """Each named number with its lower and upper bound."""
    may_decline: bool = False
    """Whether a client may answer without any state and number, if it has nothing to contribute."""

    def outline(self, tensors: Iterable[str]) -> dict[str, list[str]]:
        """Return for each state which of a full model's ``tensors`` it holds."""
        names = sorted(tensors)
        return {state: list(filter(holds, names)) for state, holds in self.states.items()}

    def within(self, name: str, value: float) -> float:
        """Return ``value`` within the bounds of ``name``; NaN becomes the greatest."""
        least, greatest = self.numbers[name]
        return greatest if math.isnan(value) else min(max(value, least), greatest)


class ClientRuntime(Protocol):
    """Serve a method's client half; the same on a device and in a simulation.

    ``step`` may be captured once and replayed, for all clients together: it must make no decision on
    the host that changes between rounds. It gets what it needs from ``start`` through ``set_buffer``,
    also for a client that contributes nothing.
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

    def model(self, name: str) -> nn.Module:
        """Return this client's full model called ``name``, with the weights that were last loaded."""

    def sum_model(self, name: str, fixed: str, learned: str, names: Sequence[str]) -> nn.Module:
        """Make the model ``name`` the sum of two others in the parameters ``names`` and return it.

        It shares its other parameters with ``fixed`` and its buffers with ``learned``. A step on the
        sum changes ``learned`` only. Call this again whenever one of the two was loaded.
        """

    def received(self, name: str) -> State | None:
        """Return a state sent at the round's start; None if this client was not sent it."""

    def fetch(self, name: str) -> State:
        """Download a state of ``FullRound.on_request`` now (counted) and return it."""

    def rng(self, purpose: str) -> np.random.Generator:
        """Return a host generator for this client, round and purpose."""

    def images(self, view: ViewKind, batch: int) -> Iterator[Tensor]:
        """Yield one ``view`` of every local image, normalised, at most ``batch`` at a time."""

    def predict(self, model: nn.Module, view: ViewKind) -> Tensor:
        """Return softmax of ``model`` in eval mode on one ``view`` ("weak", "plain") of every local image."""

    def draw_batches(self, rng: np.random.Generator, pool: np.ndarray) -> np.ndarray:
        """Return batches [steps, batch] of the local images in ``pool``; if it is empty, of the first image.

        With `clients.epochs` the round of this client ends after that many passes over ``pool``, if its
        steps are not over before. The batches behind the end are not used.
        """
        ...

    def draw_view(self, name: str, view: ViewKind, indices: np.ndarray) -> None:
        """Plan ``view`` ("weak", "strong", "plain") of images ``indices`` [steps, batch] for ``batch_of``."""

    def batch_of(self, name: str) -> Tensor:
        """Return this step's normalised images of a planned view."""

    def truth(self, indices: np.ndarray) -> Tensor:
        """Return true labels of local images, for statistics only; -1 where unknown, as on a device."""

    def set_buffer(self, name: str, value: Tensor) -> Tensor:
        """Copy ``value`` to the buffer ``name``, which keeps its address between rounds."""

    def buffer(self, name: str) -> Tensor:
        """Return the tensor that `set_buffer` stored under this name."""

    def buffer_step(self, name: str) -> Tensor:
        """Return the current step's row of a buffer [steps, ...]."""

    def descend(
        self,
        model: nn.Module,
        loss: Tensor,
        clip_norm: float | None = None,
        regularisers: Regularisers = UNREGULARISED,
    ) -> None:
        """Take one SGD step of ``model`` on ``loss``, with this round's rate and the run's momentum.

        The step also follows the gradient of ``regularisers``, which only a sum model has.
        """


class ClientWork(Protocol):
    """Do a client's part of a full-model round.

    ``only_called`` names models, for example ``("student", "helper*")``. The work only calls, loads,
    descends and averages them and touches their parameters in no other way, so their layers may
    compute on copies of lower precision.
    """

    name: str

    @property
    def answers(self) -> Answers:
        """Declare what `finish` returns."""

    def start(self, client: ClientRuntime) -> bool:
        """Prepare the round; return False if this client has nothing to contribute."""

    def step(self, client: ClientRuntime) -> None:
        """Take one of the round's steps. It may be captured and replayed: see `ClientRuntime`."""

    def finish(self, client: ClientRuntime) -> tuple[dict[str, State], dict[str, float]]:
        """Return named states to upload (counted as ``model``) and plain numbers."""


# --- clients that count for less --------------------------------------------------------------------------


def _log(client: int, why: str) -> None:
    log.info("client %d is held back: %s", client, why)


class HeldBack:
    """Which clients counted for less in the current round, with the reasons.

    ``tell`` gets each client and reason at once: it writes log and audit lines.
    """

    def __init__(self, tell: Callable[[int, str], None] = _log) -> None:
        self._tell = tell
        self._reasons: dict[int, list[str]] = {}

    def add(self, client: int, why: str) -> None:
        """Note that ``client`` was held back, and pass the reason on at once."""
        self.note(client, why)
        self._tell(client, why)

    def note(self, client: int, why: str) -> None:
        """Do the same as `add` without logging."""
        self._reasons.setdefault(client, []).append(why)

    def take(self) -> dict[str, str] | None:
        """Return the reasons by client since the last call; None if there are none."""
        reasons, self._reasons = self._reasons, {}
        return {str(client): "; ".join(reasons[client]) for client in sorted(reasons)} or None


# --- the fleet, as the method's server half sees it -----------------------------------------------------


class Fleet(Protocol):
    """Give a method access to its clients. Made from a `FleetSetup`, then opened, then closed."""

    traffic: Traffic
    capturable: bool
    """Whether a step may be captured and replayed (clients in this process, on a GPU)."""
    held_back: HeldBack
    """Clients whose influence was limited in the current round, and why."""

    def open(self, directory: Path | None) -> None:
        """Let clients in. Write what must outlast this process to the run's ``directory``."""

    def close(self, finished: bool) -> None:
        """End the run if ``finished``; else end this process only, and clients wait for the next one."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a restarted run must know about its clients; traffic is saved separately."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; an empty one changes nothing."""

    def image_counts(self) -> Mapping[int, int]:
        """Return how many images each client holds, of all that were ever here."""

    def present(self) -> Sequence[int]:
        """Return the clients that are there."""

    def members(self) -> Mapping[int, str]:
        """Return the clients that are there or may come back, each with its name.

        Those that were removed or shut out are not among them. A client with another name is another one.
        """

    def wait_ready(self) -> None:
        """Return once enough clients are there for a round."""

    def start_round(self, plan: SplitRound) -> None:
        """Send the bottoms to the active clients and let them begin a split round."""

    def forward(self) -> Features:
        """Return one batch of features of every active client that answers; once per step, before `backward`."""

    def backward(self, gradients: Tensor) -> None:
        """Let each client back-propagate its rows of ``gradients`` [rows, features] and take one step."""

    def finish_round(self) -> State:
        """Return the bottoms of the remaining clients as one, by the rule of ``robust.aggregate``."""

    def train(self, work: ClientWork, plan: FullRound) -> list[ClientResult]:
        """Run a full-model round: every active client runs ``work``. Return the answers of those that answered."""

    def settle(self, good: bool) -> str | None:
        """End the round. If it was not ``good``, return the client to exclude from its retry.

        None: nobody stands out.
        """


def draw_active(
    seed: int, round_index: int, total: int, present: Sequence[int], count: int
) -> tuple[int, ...]:
    """Return the clients of a round, sorted: ``count`` of ``total``, or all who are present if they are fewer.

    They are drawn uniformly without replacement, as a function of seed and round; the next in line
    replaces an absent one.
    """
    order = seeds.generator(seed, "active", round_index).permutation(total)
    there = set(present)
    return tuple(sorted([int(client) for client in order if int(client) in there][:count]))


def mean_state(states: Sequence[State]) -> State:
    """Return the plain mean of parameters and buffers; integer counters are averaged and truncated.

    All states have the same tensors as the first one.
    """
    return {
        name: mean_of_rows(torch.stack([state[name] for state in states])) for name in states[0]
    }
