"""The base of every method: what a run gives it, and what it must offer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from semisfl import seeds
from semisfl.data.labeled import LabeledImages
from semisfl.engine.hardware import Hardware
from semisfl.fleet.base import Fleet, draw_active
from semisfl.metrics import MethodMetrics
from semisfl.models.layers import use_generator
from semisfl.models.split import SplitModel
from semisfl.settings.config import Config
from semisfl.stopping import StopFlag


@dataclass(frozen=True)
class Setup:
    """Everything that a run gives to its method.

    ``labeled`` shows the server's images, ``fleet`` gives access to the clients, ``hardware`` makes
    optimisers and fast steps, and ``stop`` says when the run is to end.
    """

    config: Config
    model: SplitModel
    fleet: Fleet
    labeled: LabeledImages
    classes: int
    hardware: Hardware
    stop: StopFlag

    def active(self, round_index: int) -> tuple[int, ...]:
        """Return V_h: the active clients of a round, drawn from those present, sorted. It may be fewer than wanted."""
        clients = self.config.clients
        return draw_active(
            self.config.seed, round_index, clients.total, self.fleet.present(), clients.active
        )

    def make_step(self, step: Callable[[], None], with_clients: bool = False) -> Callable[[], None]:
        """Return the function to call once per iteration in place of ``step``; it raises `Stopped` if the run is to end.

        ``with_clients``: whether the step exchanges features with them. `Hardware.make_step` says what
        a step may do.
        """
        alone = not with_clients or self.fleet.capturable
        return self.hardware.make_step(step, alone, self.stop.check)

    def labeled_share(self) -> float:
        """Return |D_l| / |D|, over the images of every client that ever joined."""
        labeled = len(self.labeled)
        return labeled / (labeled + sum(self.fleet.image_counts().values()))


class Method(Protocol):
    """One way to train. ``tested`` names the models that a run evaluates; the first is its result."""

    def __init__(self, setup: Setup) -> None:
        """Build models and optimisers. Nothing is sent or trained yet."""

    def round(self, round_index: int) -> MethodMetrics:
        """Train round ``round_index`` (from 0) and return its metrics.

        Raises `RoundAborted` if too few clients are left; the run then restores the state and repeats the round.
        """

    def tested(self) -> Mapping[str, nn.Module]:
        """Return the models that are evaluated, by name; the first one is the run's result."""

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next round depends on: tensors and plain values, in lists and in dictionaries by text."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`. This also undoes an attempt of a round: nothing of it may be left."""


class ServerDropout:
    """Draw the server's dropout masks as a function of (seed, round)."""

    def __init__(self, setup: Setup) -> None:
        self._seed = setup.config.seed
        self._generator = setup.hardware.generator(0)
        use_generator(setup.model, self._generator)

    def start(self, round_index: int) -> None:
        """Seed the masks of a round; call it before the round's first step."""
        self._generator.manual_seed(seeds.derive(self._seed, "dropout", round_index))
