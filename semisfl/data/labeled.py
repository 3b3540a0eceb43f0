"""The server's labelled images D_l, as batches with their labels.

What a supervised step shows of an image depends on the method: a strong view, a weak one, both, or pairs of
images blended with their labels (`LabeledView`).
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from semisfl import seeds
from semisfl.data.batches import RoundBatches, Views, draw_view, make_view
from semisfl.data.positions import draw_batches
from semisfl.settings.config import Config
from semisfl.settings.sections import LabeledView, View

# The published code shuffles enough labelled images for this many steps, whatever K_s is.
LABELED_POOL_STEPS = 100


class Labels(NamedTuple):
    """The labels of a batch, and for mixed images those of the images that were mixed in."""

    own: Tensor
    others: Tensor | None = None
    share: Tensor | None = None
    """float [n]: how much of each image is its own, at least a half."""


class LabeledImages:
    """The server's labelled images D_l, as two independent views and labels per step."""

    def __init__(
        self,
        batches: RoundBatches,
        labels: Tensor,
        config: Config,
        while_busy: Callable[[Callable[[], None]], None] = lambda task: None,
    ) -> None:
        """Take ``while_busy``, which runs a task when the host would otherwise wait, or never."""
        self._batches = batches
        self.labels = labels
        """The classes of the labelled images, int64 [n]."""
        self._config = config
        self._while_busy = while_busy

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return channels, height and width of an image."""
        _, channels, height, width = self._batches.images.shape
        return channels, height, width

    def normalized(self, images: Tensor) -> Tensor:
        """Return uint8 images [n, C, H, W] as a model takes them: floats on its device."""
        return self._batches.normalizer(images.to(self._batches.images.device), self._batches.dtype)

    def plain(self, batch: int) -> Iterator[Tensor]:
        """Return every labelled image, un-augmented, at most ``batch`` at a time."""
        images = self._batches.images
        return (
            self.normalized(images[first : first + batch]) for first in range(0, len(images), batch)
        )

    def views(self, weak: int) -> Tensor:
        """Return every labelled image un-augmented, then all of them in ``weak`` weak views, as uint8."""
        images, augmentation = self._batches.images, self._batches.augmentation
        places, size = np.tile(np.arange(len(images)), weak), (images.shape[2], images.shape[3])
        drawn = draw_view(augmentation, "weak", places, size, self._config.seed, "probe")
        return torch.cat([images, make_view(images, drawn)])

    def class_mix(self, classes: int) -> Tensor:
        """Return the share of each class among the labels, [classes]; a class without images counts as half an image."""
        counts = torch.bincount(self.labels, minlength=classes).float().clamp(min=0.5)
        return counts / counts.sum()

    def start(self, round_index: int, steps: int, view: LabeledView, views: int = 2) -> None:
        """Begin a round of ``steps`` with this ``view`` of the images, drawn ``views`` times independently."""
        self._view_kinds, self._mixes = tuple(_kinds(view, views)), view == "mixed"
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
        device = self.labels.device
        extras = {"labels": self.labels[torch.from_numpy(indices).to(device)]}
        if view == "mixed":
            rng = seeds.generator(seed, "mixed", round_index)
            shares, partners = draw_pairs(rng, steps, batch)
            extras["shares"] = torch.from_numpy(shares).to(device)
            extras["partners"] = torch.from_numpy(partners).to(device)
        return plans, extras

    def next(self) -> tuple[Tensor, Labels]:
        """Return the images and labels of a step, and go to the next step.

        With the view "both" these are the strong images and then the weak ones, each with its label.
        """
        views = [self._batches.get(name) for name in self._view_kinds]
        images, labels = self._mixed(views)
        self._batches.advance()
        return images, labels

    def next_two(self) -> tuple[Tensor, Labels, Tensor, Tensor]:
        """Return images and labels as `next` does, and a second view of the images, never mixed, with its labels."""
        first, second, *weak = (self._batches.get(name) for name in self._view_kinds)
        images, labels = self._mixed([first, *weak])
        plain = self._batches.extra("labels")
        self._batches.advance()
        return images, labels, second, plain

    def _mixed(self, views: list[Tensor]) -> tuple[Tensor, Labels]:
        """Return the views as one batch with its labels; in the view "mixed", images are blended in pairs."""
        images, labels = views[0], self._batches.extra("labels")
        if len(views) > 1:
            images, labels = torch.cat(views), labels.repeat(len(views))
        if not self._mixes:
            return images, Labels(labels)
        share, partner = self._batches.extra("shares"), self._batches.extra("partners")
        weight = share.view(-1, 1, 1, 1).to(images.dtype)
        mixed = torch.lerp(images.index_select(0, partner), images, weight)
        return mixed, Labels(labels, labels.index_select(0, partner), share)


def draw_pairs(rng: np.random.Generator, steps: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Return for each image of each step its own share, uniform in [0.5, 1], and the place of the image mixed in."""
    shares = rng.uniform(0.5, 1.0, (steps, batch)).astype(np.float32)
    return shares, rng.random((steps, batch)).argsort(axis=1)


def _kinds(view: LabeledView, views: int) -> dict[str, View]:
    """Return the views of each image that a step shows, by name."""
    kind: View = "weak" if view == "weak" else "strong"
    kinds: list[View] = [kind] * views + (["weak"] if view == "both" else [])
    return {f"view{number}": kind for number, kind in enumerate(kinds, 1)}
