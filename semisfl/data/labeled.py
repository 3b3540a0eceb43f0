"""The server's labelled images, as batches with their labels."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from semisfl import seeds
from semisfl.data.batches import RoundBatches, Views, draw_view
from semisfl.data.positions import draw_batches
from semisfl.settings.config import Config
from semisfl.settings.sections import LabeledView, View

# The published code shuffles enough labelled images for this many steps, whatever K_s is.
LABELED_POOL_STEPS = 100


class LabeledImages:
    """The server's labelled images D_l, as two independent views and labels per step."""

    def __init__(
        self,
        batches: RoundBatches,
        labels: Tensor,
        config: Config,
        while_busy: Callable[[Callable[[], None]], None] = lambda task: None,
    ) -> None:
        """``while_busy`` runs a task when the host would otherwise wait, or never."""
        self._batches = batches
        self._labels = labels
        self._config = config
        self._while_busy = while_busy

    def __len__(self) -> int:
        return len(self._labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        _, channels, height, width = self._batches.images.shape
        return channels, height, width

    def normalized(self, images: Tensor) -> Tensor:
        """Return uint8 images as a model takes them."""
        return self._batches.normalizer(images.to(self._batches.images.device), self._batches.dtype)

    def plain(self, batch: int) -> Iterator[Tensor]:
        """Return every labelled image, un-augmented, at most ``batch`` at a time."""
        images = self._batches.images
        return (
            self.normalized(images[first : first + batch]) for first in range(0, len(images), batch)
        )

    def class_mix(self, classes: int) -> Tensor:
        """Return the share of each class; a class without images counts as half an image."""
        counts = torch.bincount(self._labels, minlength=classes).float().clamp(min=0.5)
        return counts / counts.sum()

    def start(self, round_index: int, steps: int, view: LabeledView, views: int = 2) -> None:
        """Begin a round of ``steps`` with this ``view`` of the images, drawn ``views`` times."""
        self._shown = tuple(_kinds(view, views))
        self._batches.start_from((round_index, steps, view, views), self._make)
        self._while_busy(
            lambda: self._batches.ahead((round_index + 1, steps, view, views), self._make)
        )

    def _make(self, round_index: int, steps: int, view: LabeledView, views: int) -> Views:
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
        """Return one view and the labels, and go to the next step.

        With the view "both" these are the strong images and then the weak ones, each with its label.
        """
        views = [self._batches.get(name) for name in self._shown]
        labels = self._batches.extra("labels")
        self._batches.advance()
        if len(views) == 1:
            return views[0], labels
        return torch.cat(views), labels.repeat(len(views))

    def next_two(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return two views and the labels, and go to the next step.

        With the view "both" the first view holds the strong images and then the weak ones.
        """
        first, second, *weak = (self._batches.get(name) for name in self._shown)
        triple = torch.cat([first, *weak]) if weak else first, second, self._batches.extra("labels")
        self._batches.advance()
        return triple


def _kinds(view: LabeledView, views: int) -> dict[str, View]:
    """Return the views of each image that a step shows, by name."""
    kinds: list[View] = [*["strong"] * views, "weak"] if view == "both" else [view] * views  # type: ignore[list-item]
    return {f"view{number}": kind for number, kind in enumerate(kinds, 1)}
