"""Augmented batches of a round: drawn at its start, made in few large calls, read step by step.

A view is a set of images with what is drawn for each of them (`DrawnView`). `RoundBatches` makes the views on the
device and hands them out, one step at a time; a client that computes on its own reads its `Part`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from semisfl import seeds
from semisfl.data import augment
from semisfl.data.augment import Augmentation, Normalizer
from semisfl.data.positions import draw_positions
from semisfl.engine.kernels import normalized_row

ViewKind = Literal["weak", "strong", "plain"]
Key = tuple[Any, ...]


@dataclass(frozen=True)
class DrawnView:
    """The images of a view at each step, and what was drawn for each of them.

    Indexing by a slice of steps returns the view of these steps.
    """

    view: ViewKind
    indices: np.ndarray
    """[steps, rows] into the images."""
    draws: Any
    """WeakDraws or StrongDraws with the same leading shape; None for plain images."""

    def __getitem__(self, steps: slice) -> "DrawnView":
        return DrawnView(
            self.view, self.indices[steps], None if self.draws is None else self.draws[steps]
        )


Views = tuple[Mapping[str, DrawnView], Mapping[str, Tensor]]
"""The views of a round, and tensors [steps, ...] that are read along with them."""


def draw_view(
    augmentation: Augmentation,
    view: ViewKind,
    indices: np.ndarray,
    size: tuple[int, int],
    seed: int,
    *purpose: int | str,
) -> DrawnView:
    """Return a view of the images ``indices`` [steps, rows]; its draws depend on ``seed`` and ``purpose`` alone.

    ``size``: height and width of an image.
    """
    rng = seeds.generator(seed, *purpose)
    draw = {"weak": augmentation.draw_weak, "strong": augmentation.draw_strong}.get(view)
    return DrawnView(view, indices, draw(rng, indices.shape, *size) if draw else None)


def join_views(plans: list[DrawnView]) -> DrawnView:
    """Return the views of several clients as one, [steps, rows of all clients]: each step is one batch."""
    indices = np.concatenate([item.indices for item in plans], axis=1)
    draws = [item.draws for item in plans]
    if draws[0] is None:
        return DrawnView(plans[0].view, indices, None)
    return DrawnView(plans[0].view, indices, type(draws[0]).concatenate(draws, axis=1))


def split_views(
    augmentation: Augmentation,
    shard: np.ndarray,
    size: tuple[int, int],
    steps: int,
    batch: int,
    seed: int,
    round_index: int,
    client: int,
) -> dict[str, DrawnView]:
    """Return the strong and the weak view of one client's images in a split round.

    Both show the same images. ``shard``: the client's indices into the images; ``size``: height and width;
    ``steps`` and ``batch``: K_u and B_u.
    """
    indices = shard[draw_positions(seed, round_index, client, len(shard), steps, batch)]
    return {
        "strong": draw_view(
            augmentation, "strong", indices, size, seed, "strong", round_index, client
        ),
        "weak": draw_view(augmentation, "weak", indices, size, seed, "weak", round_index, client),
    }


def make_view(images: Tensor, planned: DrawnView) -> Tensor:
    """Return the uint8 images [n, C, H, W] of ``planned``, its leading shape flattened, on the device of ``images``."""
    index = torch.from_numpy(np.ascontiguousarray(planned.indices.reshape(-1))).to(
        images.device, non_blocking=True
    )
    chosen = images.index_select(0, index)
    if planned.view == "plain":
        return chosen
    apply = {"weak": augment.weak, "strong": augment.strong}[planned.view]
    return apply(chosen, planned.draws.flatten())


@dataclass(frozen=True)
class _Prepared:
    """A round that may begin: its views, their images if all steps are made at once, and what is read along."""

    plans: Mapping[str, DrawnView]
    made: Mapping[str, Tensor]
    extras: Mapping[str, Tensor]


class RoundBatches:
    """The batches of a round, read by a step counter that is on the device.

    Args:
        images: uint8 [n, C, H, W], on the device that computes.
        augmentation: the settings of weak and strong views.
        normalizer: turns uint8 images into floats.
        dtype: the type of these floats.
        whole: all steps are made at the start, in buffers that stay in place, so that a captured step can read
            them. Otherwise they are made when needed.
        budget: most bytes of views that are made ahead where not ``whole``.
    """

    def __init__(
        self,
        images: Tensor,
        augmentation: Augmentation,
        normalizer: Normalizer,
        dtype: torch.dtype,
        *,
        whole: bool,
        budget: int = 256 * 2**20,
    ) -> None:
        self.images = images
        self.augmentation = augmentation
        self.normalizer = normalizer
        self.dtype = dtype
        self.whole = whole
        self.budget = budget
        self._counter = torch.zeros(1, dtype=torch.long, device=images.device)
        self._views: dict[str, Tensor] = {}
        self._extras: dict[str, Tensor] = {}
        self._plans: Mapping[str, DrawnView] = {}
        self._waiting: tuple[Key, _Prepared] | None = None
        self._step = self._first = self._last = 0

    def start(
        self, plans: Mapping[str, DrawnView], extras: Mapping[str, Tensor] | None = None
    ) -> None:
        """Start a round; ``extras`` are tensors [steps, ...] that are read along with the views."""
        self._begin(self._prepare(plans, extras or {}))

    def start_from(self, key: Key, make: Callable[..., Views]) -> None:
        """Start the round ``key`` with the views ``make(*key)``, or with those that `ahead` made."""
        waiting, self._waiting = self._waiting, None
        self._begin(waiting[1] if waiting and waiting[0] == key else self._prepare(*make(*key)))

    def ahead(self, key: Key, make: Callable[..., Views]) -> None:
        """Make the views of a later round ``make(*key)``, beside those in use; `start_from` then takes them."""
        self._waiting = key, self._prepare(*make(*key))

    def _prepare(self, plans: Mapping[str, DrawnView], extras: Mapping[str, Tensor]) -> _Prepared:
        made = {name: self._make(planned) for name, planned in plans.items()} if self.whole else {}
        return _Prepared(plans, made, extras)

    def _begin(self, prepared: _Prepared) -> None:
        self._plans = prepared.plans
        self._first = self._step = 0
        self._last = self._steps if self.whole else 0
        self._counter.zero_()
        for name, value in prepared.extras.items():
            self._extras[name] = self._place(self._extras.get(name), value)
        for name, value in prepared.made.items():
            self._views[name] = self._place(self._views.get(name), value)

    @property
    def _steps(self) -> int:
        return len(next(iter(self._plans.values())).indices)

    def _make(self, planned: DrawnView) -> Tensor:
        made = make_view(self.images, planned)
        return made.view(*planned.indices.shape, *made.shape[1:])

    def _place(self, buffer: Tensor | None, value: Tensor) -> Tensor:
        """Return ``value`` in its earlier buffer, if it fits: captured steps read that address."""
        value = value.to(self.images.device)
        if (
            not self.whole
            or buffer is None
            or buffer.shape[1:] != value.shape[1:]
            or len(buffer) < len(value)
        ):
            return value
        buffer[: len(value)].copy_(value)
        if value.is_cuda:
            # Another stream may have made it; its memory must not be reused before this copy is done.
            value.record_stream(torch.cuda.current_stream())
        return buffer

    def get(self, name: str) -> Tensor:
        """Return the current step's images of a view, normalised: [rows, C, H, W]."""
        if not self.whole and not self._first <= self._step < self._last:
            self._make_stretch()
        views = self._views[name]
        if self.whole:
            scale, offset = self.normalizer.scale, self.normalizer.offset
            return normalized_row(views, self._counter, scale, offset, self.dtype)
        return self.normalizer(self._row(views, self._first), self.dtype)

    def _make_stretch(self, each: int = 1) -> None:
        """Make the views of the next steps, as many as the budget allows at ``each`` bytes per value."""
        rows = sum(item.indices.shape[1] for item in self._plans.values())
        fit = self.budget // (rows * self.images[0].numel() * each)
        self._first, self._last = self._step, min(self._steps, self._step + max(1, fit))
        for name, planned in self._plans.items():
            self._views[name] = self._make(planned[self._first : self._last])

    def stretches(self, clients: int) -> Iterator[list["Part"]]:
        """Yield the round in stretches that fit the budget, each as one part per client."""
        while self._step < self._steps:
            self._make_stretch(each=1 + self.dtype.itemsize)
            steps = range(self._first, self._last)
            # One call for all steps and clients: with small models normalising costs as much as training.
            normalized = {
                name: self.normalizer(self._views[name].flatten(0, 1), self.dtype)
                for name in self._plans
            }
            yield [Part(normalized, steps, place, clients) for place in range(clients)]
            self._step = self._last

    def extra(self, name: str) -> Tensor:
        """Return the current step's row of a tensor that was given at the start of the round."""
        return self.row_of(self._extras[name])

    def row_of(self, tensor: Tensor) -> Tensor:
        """Return the current step's row of any tensor [steps, ...]."""
        return self._row(tensor, 0)

    def _row(self, tensor: Tensor, first: int) -> Tensor:
        if self.whole:
            return tensor.index_select(0, self._counter)[0]
        return tensor[self._step - first]

    def advance(self) -> None:
        """Go to the next step."""
        self._step += 1
        self._counter.add_(1)


class Part:
    """One client's rows of a stretch of steps, normalised; each client reads on its own."""

    def __init__(self, views: Mapping[str, Tensor], steps: range, place: int, clients: int) -> None:
        self.steps = steps
        self._views = views
        self._place, self._clients = place, clients
        self._step = steps.start

    def get(self, name: str) -> Tensor:
        """Return this step's images: a slice of the first axis, because only that keeps channels-last."""
        images = self._views[name]
        rows = len(images) // (len(self.steps) * self._clients)
        start = ((self._step - self.steps.start) * self._clients + self._place) * rows
        return images[start : start + rows]

    def row_of(self, tensor: Tensor) -> Tensor:
        """Return the current step's row of any tensor [steps, ...]."""
        return tensor[self._step]

    def advance(self) -> None:
        """Go to the client's next step."""
        self._step += 1
