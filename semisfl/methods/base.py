"""What every method stands on: the server's own models, its labelled batches, its statistics."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from semisfl import seeds
from semisfl.data.batches import RoundBatches, Views, draw_batches, draw_view
from semisfl.engine.hardware import Hardware
from semisfl.fleet.base import Fleet, draw_active
from semisfl.metrics import MethodMetrics
from semisfl.models.layers import use_generator
from semisfl.models.split import SplitModel
from semisfl.settings.config import Config
from semisfl.settings.sections import View
from semisfl.stopping import StopFlag

# The published code shuffles enough labelled images for so many steps, whatever K_s is.
LABELED_POOL_STEPS = 100


@dataclass(frozen=True)
class Setup:
    """What a run hands to its method."""

    config: Config
    model: SplitModel
    fleet: Fleet
    labeled: "LabeledImages"
    classes: int
    hardware: Hardware
    stop: StopFlag

    def active(self, round_index: int) -> tuple[int, ...]:
        """V_h: the clients of a round, drawn anew for each among those who are there."""
        clients = self.config.clients
        return draw_active(
            self.config.seed, round_index, clients.total, self.fleet.present(), clients.active
        )

    def capture(self, step: Callable[[], None], capturable: bool = True) -> Callable[[], None]:
        """``step``, to be called once per iteration: captured where that pays, ended when asked."""
        captured = self.hardware.graphs.capture(step, capturable)

        def stoppable() -> None:
            self.stop.check()
            captured()

        return stoppable

    def labeled_share(self) -> float:
        """|D_l| / |D|, over the images of every client that was ever here."""
        labeled = len(self.labeled)
        return labeled / (labeled + sum(self.fleet.image_counts().values()))


class Method(Protocol):
    """One way to train. ``tested`` names the models a run evaluates, the first one being its result."""

    def __init__(self, setup: Setup) -> None: ...

    def round(self, round_index: int) -> MethodMetrics:
        """One round; its statistics."""
        ...

    def tested(self) -> Mapping[str, nn.Module]: ...

    def state_dict(self) -> dict[str, Any]:
        """Everything the next round depends on: tensors and plain values, nested."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class LabeledImages:
    """The server's labelled images D_l, as two independent views and labels per step."""

    def __init__(
        self, batches: RoundBatches, labels: Tensor, config: Config, hardware: Hardware
    ) -> None:
        self._hardware = hardware
        self._batches = batches
        self._labels = labels
        self._config = config

    def __len__(self) -> int:
        return len(self._labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        _, channels, height, width = self._batches.images.shape
        return channels, height, width

    def normalized(self, images: Tensor) -> Tensor:
        """uint8 images as a model takes them."""
        return self._batches.normalizer(images.to(self._batches.images.device), self._batches.dtype)

    def plain(self, batch: int) -> Iterator[Tensor]:
        """Every labelled image, un-augmented, at most ``batch`` at a time."""
        images = self._batches.images
        return (
            self.normalized(images[first : first + batch]) for first in range(0, len(images), batch)
        )

    def class_mix(self, classes: int) -> Tensor:
        """The share of each class; one without an image has that of half an image."""
        counts = torch.bincount(self._labels, minlength=classes).float().clamp(min=0.5)
        return counts / counts.sum()

    def start(
        self, round_index: int, steps: int, view: View | Literal["both"], views: int = 2
    ) -> None:
        self._shown = tuple(_kinds(view, views))
        self._batches.start_from((round_index, steps, view, views), self._make)
        self._hardware.streams.while_busy(
            lambda: self._batches.ahead((round_index + 1, steps, view, views), self._make)
        )

    def _make(
        self, round_index: int, steps: int, view: View | Literal["both"], views: int
    ) -> Views:
        seed, batch = self._config.seed, self._config.server.batch
        rng = seeds.generator(seed, "labeled", round_index)
        indices = draw_batches(rng, len(self), steps, batch, least=LABELED_POOL_STEPS * batch)
        images = self._batches.images
        size = (images.shape[2], images.shape[3])
        plans = {
            name: draw_view(
                self._batches.augmentation,
                kind,
                indices,
                size,
                seed,
                f"labeled-{name}",
                round_index,
            )
            for name, kind in _kinds(view, views).items()
        }
        return plans, {"labels": self._labels[torch.from_numpy(indices).to(self._labels.device)]}

    def next(self) -> tuple[Tensor, Tensor]:
        """One view and the labels."""
        pair = self._batches.get("view1"), self._batches.extra("labels")
        self._batches.advance()
        return pair

    def next_two(self) -> tuple[Tensor, Tensor, Tensor]:
        """Two views and the labels; of "both", the first is strong ones and then as many weak ones."""
        first, second, *weak = (self._batches.get(name) for name in self._shown)
        triple = torch.cat([first, *weak]) if weak else first, second, self._batches.extra("labels")
        self._batches.advance()
        return triple


def _kinds(view: View | Literal["both"], views: int) -> dict[str, View]:
    """What a step shows of each image."""
    kinds: list[View] = [*["strong"] * views, "weak"] if view == "both" else [view] * views  # type: ignore[list-item]
    return {f"view{number}": kind for number, kind in enumerate(kinds, 1)}


class Meter:
    """Sums on the device, read once per round."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._sums: dict[tuple[str, ...], Tensor] = {}
        self._shapes: dict[str, torch.Size] = {}

    def add(self, **values: Tensor) -> None:
        """Values that come together are one sum: a step has kernels enough."""
        names = tuple(values)
        joined = torch.cat([value.detach().reshape(-1).float() for value in values.values()])
        # A round with fewer clients than the last has shorter sums by client.
        if names not in self._sums or self._sums[names].shape != joined.shape:
            self._sums[names] = torch.zeros_like(joined)
            self._shapes |= {name: value.shape for name, value in values.items()}
        self._sums[names].add_(joined)

    def read(self) -> dict[str, Any]:
        """The sums as plain numbers or lists; starts again from zero."""
        self._hardware.streams.before_waiting()
        read = {}
        for names, total in self._sums.items():
            shapes = [self._shapes[name] for name in names]
            parts = total.cpu().split([shape.numel() for shape in shapes])
            for name, part, shape in zip(names, parts, shapes, strict=True):
                read[name] = part.view(shape).tolist()
        self.clear()
        return read

    def clear(self) -> None:
        """Start again from zero, without waiting for the device."""
        for total in self._sums.values():
            total.zero_()


class ServerDropout:
    """Dropout on the server draws anew each round, as a function of (seed, round)."""

    def __init__(self, setup: Setup) -> None:
        self._seed = setup.config.seed
        self._generator = setup.hardware.graphs.generator(0)
        use_generator(setup.model, self._generator)

    def start(self, round_index: int) -> None:
        self._generator.manual_seed(seeds.derive(self._seed, "dropout", round_index))
