"""Define a method's client half: what it may use, what it does in a round and what it answers."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from semisfl.data.batches import ViewKind
from semisfl.engine.sums import UNREGULARISED
from semisfl.engine.sums import Regularisers as Regularisers
from semisfl.engine.weights import State


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
