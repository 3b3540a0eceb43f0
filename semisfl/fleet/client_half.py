"""Define a method's client half: what it may use, what it does in a round and what it answers."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from semisfl.data.batches import ViewKind
from semisfl.engine.sums import UNREGULARISED, Regularisers
from semisfl.engine.weights import State


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
        ...

    def sum_model(self, name: str, fixed: str, learned: str, names: Sequence[str]) -> nn.Module:
        """Make the model ``name`` the sum of two others in the parameters ``names`` and return it.

        It shares its other parameters with ``fixed`` and its buffers with ``learned``. A step on the
        sum changes ``learned`` only. Call this again whenever one of the two was loaded.
        """
        ...

    def received(self, name: str) -> State | None:
        """Return a state sent at the round's start; None if this client was not sent it."""
        ...

    def fetch(self, name: str) -> State:
        """Download a state of ``FullRound.on_request`` now (counted) and return it."""
        ...

    def rng(self, purpose: str) -> np.random.Generator:
        """Return a host generator for this client, round and purpose."""
        ...

    def images(self, view: ViewKind, batch: int) -> Iterator[Tensor]:
        """Yield one ``view`` of every local image, normalised, at most ``batch`` at a time."""
        ...

    def predict(self, model: nn.Module, view: ViewKind) -> Tensor:
        """Return softmax of ``model`` in eval mode on one ``view`` ("weak", "plain") of every local image."""
        ...

    def draw_view(self, name: str, view: ViewKind, indices: np.ndarray) -> None:
        """Plan ``view`` ("weak", "strong", "plain") of images ``indices`` [steps, batch] for ``batch_of``."""
        ...

    def batch_of(self, name: str) -> Tensor:
        """Return this step's normalised images of a planned view."""
        ...

    def truth(self, indices: np.ndarray) -> Tensor:
        """Return true labels of local images, for statistics only; -1 where unknown, as on a device."""
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
        """Take one SGD step of ``model`` on ``loss``, with this round's rate and the run's momentum.

        The step also follows the gradient of ``regularisers``, which only a sum model has.
        """
        ...


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
        ...

    def start(self, client: ClientRuntime) -> bool:
        """Prepare the round; return False if this client has nothing to contribute."""
        ...

    def step(self, client: ClientRuntime) -> None: ...

    def finish(self, client: ClientRuntime) -> tuple[dict[str, State], dict[str, float]]:
        """Return named states to upload (counted as ``model``) and plain numbers."""
        ...
