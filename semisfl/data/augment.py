"""Augment whole batches of uint8 images weakly or strongly, on a CPU or a GPU.

`Augmentation.draw_weak` and `draw_strong` draw on the host what happens to each image, for any
number of steps at once; `weak` and `strong` apply it. Because the draws stay on the host, images
are grouped by operation there, each operation touches only its own images, and nothing waits for
the device.

Weak: horizontal flip with p = 1/2, then a random crop after reflect padding by side // 8.
Strong: weak, then `num_ops` draws with replacement from `OPERATIONS`, then always a grey square. Each
operation is applied with p = 1/2 at a level uniform in 1..9, with a random sign if it has a direction.
Every operation gives the same result as Pillow.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from semisfl.data.operations import MAX_LEVEL, OPERATIONS, identity, to_device
from semisfl.seeds import Streams
from semisfl.settings.run import AugmentConfig

Random = np.random.Generator | Streams
GREY = 127
# RandAugment's N, as in the authors' code.
OPERATIONS_PER_IMAGE = 2


# --- what is drawn for each image, on the host ----------------------------------------------------


@dataclass(frozen=True, eq=False)
class WeakDraws:
    """Draws of the weak augmentation of each image; every array has the same leading shape."""

    flip: np.ndarray  # bool
    shift_y: np.ndarray  # int16: the crop's offset from the image's own place, -pad..pad
    shift_x: np.ndarray  # int16

    def __getitem__(self, key: Any) -> Self:
        """Return the draws of one step or of a slice of steps; the key indexes the leading shape."""
        return self._map(lambda values: values[key])

    def flatten(self) -> Self:
        """Return the draws with one leading axis, image by image."""
        count, leading = self.flip.size, self.flip.ndim
        return self._map(lambda values: values.reshape(count, *values.shape[leading:]))

    @classmethod
    def concatenate(cls, parts: Sequence[Self], axis: int = 0) -> Self:
        """Return draws joined along one of their leading axes, e.g. those of several clients."""
        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(p, name) for p in parts], axis) for name in names))

    def _map(self, change: Callable[[np.ndarray], np.ndarray]) -> Self:
        return type(self)(*(change(getattr(self, field.name)) for field in fields(self)))


@dataclass(frozen=True, eq=False)
class StrongDraws(WeakDraws):
    """Draws of the strong augmentation of each image, its weak part included."""

    operation: np.ndarray  # uint8 [..., num_ops]: place in OPERATIONS
    applied: np.ndarray  # bool [..., num_ops]
    level: np.ndarray  # int8 [..., num_ops]: ±1..±9; the sign matters to geometry only
    box: np.ndarray  # int16 [..., 4]: grey from (top, left) up to, not with, (bottom, right)


@dataclass(frozen=True)
class Augmentation:
    """The settings of weak and strong augmentation; `pad` None means side // 8 on each axis.

    `cutout` is the side of the grey square, 16 pixels at every resolution; 0: no square. Its ends
    are inclusive, as in the authors' code, so it covers 17 pixels. The centre is uniform over the
    image, the upper left corner is int(max(0, centre - side / 2)), and the square runs to corner +
    side, clipped by the image. So near the top and left edges it is moved inside as a whole; at
    the bottom and right it is cut off.
    """

    flip: bool = True
    pad: int | None = None
    num_ops: int = OPERATIONS_PER_IMAGE
    cutout: int = 16

    @classmethod
    def of(cls, config: AugmentConfig) -> Self:
        """Return the augmentation of a configuration's ``[data.augment]``."""
        return cls(config.flip, cutout=config.cutout)

    def draw_weak(self, rng: Random, shape: tuple[int, ...], height: int, width: int) -> WeakDraws:
        """Return weak draws for images of ``height`` x ``width`` pixels; ``shape`` is their leading shape."""
        flip = rng.random(shape) < (0.5 if self.flip else 0.0)
        return WeakDraws(flip, self._shifts(rng, shape, height), self._shifts(rng, shape, width))

    def draw_strong(
        self, rng: Random, shape: tuple[int, ...], height: int, width: int
    ) -> StrongDraws:
        """Return strong draws for images of ``height`` x ``width`` pixels; ``shape`` is their leading shape."""
        weak = self.draw_weak(rng, shape, height, width)
        slots = (*shape, self.num_ops)
        operation = rng.integers(len(OPERATIONS), size=slots, dtype=np.uint8)
        applied = rng.random(slots) < 0.5
        level = rng.integers(1, MAX_LEVEL, size=slots, dtype=np.int8, endpoint=True)
        level = np.where(rng.random(slots) < 0.5, -level, level)
        box = self._boxes(rng, shape, height, width)
        return StrongDraws(weak.flip, weak.shift_y, weak.shift_x, operation, applied, level, box)

    def _shifts(self, rng: Random, shape: tuple[int, ...], side: int) -> np.ndarray:
        pad = side // 8 if self.pad is None else self.pad
        assert 0 <= pad < side, "an image cannot reflect more than itself"
        return rng.integers(-pad, pad, size=shape, dtype=np.int16, endpoint=True)

    def _boxes(self, rng: Random, shape: tuple[int, ...], height: int, width: int) -> np.ndarray:
        sides = np.array([height, width])
        cutout = min(self.cutout, 2 * max(height, width))  # covers any image, from any centre
        start = np.maximum(0, rng.random((*shape, 2)) * sides - cutout / 2).astype(np.int64)
        end = np.minimum(sides, start + (cutout + 1 if cutout else 0))
        return np.concatenate([start, end], axis=-1).astype(np.int16)


# --- apply the draws ------------------------------------------------------------------------------


def _reflect(shift: np.ndarray, side: int, device: torch.device) -> Tensor:
    """Return, for each image, the source of every row (or column) of a crop moved by `shift`."""
    place = (torch.arange(side, device=device) + to_device(shift, device)[:, None]).abs_()
    return torch.minimum(place, 2 * (side - 1) - place)


def weak(images: Tensor, draws: WeakDraws) -> Tensor:
    """Return uint8 images [n, C, H, W] flipped and cropped, always as a new tensor.

    ``draws`` are those of these images, in the same order.
    """
    assert images.dtype == torch.uint8 and len(images) == draws.flip.size, "other images' draws"
    draws, device = draws.flatten(), images.device
    n, channels, height, width = images.shape
    # Whole rows are moved, columns by an index that all rows share: no index as large as the batch.
    planes = torch.arange(0, n * channels * height, height, device=device).view(n, channels, 1)
    rows = planes + _reflect(draws.shift_y, height, device)[:, None]
    columns = _reflect(draws.shift_x, width, device)
    columns = torch.where(to_device(draws.flip, device)[:, None], width - 1 - columns, columns)
    moved = images.reshape(-1, width).index_select(0, rows.flatten())
    index = columns[:, None].expand(n, channels * height, width)
    return moved.view(n, channels * height, width).gather(2, index).view(images.shape)


def strong(images: Tensor, draws: StrongDraws) -> Tensor:
    """Return uint8 images [n, C, H, W] after weak augmentation, the drawn operations and the grey square."""
    out = weak(images, draws)
    draws = draws.flatten()
    place = np.arange(len(out))
    for slot in range(draws.operation.shape[1]):
        # Sort by operation, images without one last: each operation then works on one slice.
        chosen = np.where(draws.applied[:, slot], draws.operation[:, slot], len(OPERATIONS))
        order = np.argsort(chosen, kind="stable")
        out, draws, place = _reorder(out, order), draws[order], place[order]
        ends = np.cumsum(np.bincount(chosen, minlength=len(OPERATIONS)))
        for code, operation in enumerate(OPERATIONS.values()):
            start, end = ends[code - 1] if code else 0, ends[code]
            if start < end and operation is not identity:
                out[start:end] = operation(out[start:end], draws.level[start:end, slot])
    return _reorder(_cut_out(out, draws.box), np.argsort(place))


def _reorder(images: Tensor, order: np.ndarray) -> Tensor:
    return images.flatten(1).index_select(0, to_device(order, images.device)).view_as(images)


def _cut_out(images: Tensor, boxes: np.ndarray) -> Tensor:
    box = to_device(boxes, images.device).view(-1, 4, 1, 1, 1)
    y = torch.arange(images.shape[2], device=images.device, dtype=torch.int16).view(-1, 1)
    x = torch.arange(images.shape[3], device=images.device, dtype=torch.int16)
    mask = ((y >= box[:, 0]) & (y < box[:, 2])) & ((x >= box[:, 1]) & (x < box[:, 3]))
    grey = mask.flatten(2).to(torch.uint8).neg_()
    # Bit masks: `masked_fill_` with a mask that channels share takes several times as long.
    images.flatten(2).bitwise_and_(~grey).bitwise_or_(grey & GREY)
    return images


@dataclass(frozen=True, eq=False)
class Normalizer:
    """Turn uint8 images into floats: (x / 255 - mean) / std per channel, as one multiply-add."""

    scale: Tensor  # [C]
    offset: Tensor

    @classmethod
    def of(cls, mean: Sequence[float], std: Sequence[float]) -> Self:
        """Return the normaliser for one mean and one standard deviation per channel, of pixels from 0 to 1.

        Raises ValueError for different lengths and for a deviation of 0 or less.
        """
        if len(mean) != len(std) or not all(value > 0 for value in std):
            raise ValueError(
                f"cannot normalise by mean = {tuple(mean)}, std = {tuple(std)}: "
                "give one mean and one std above 0 for each channel"
            )
        means, stds = (torch.tensor(v, dtype=torch.float64, device="cpu") for v in (mean, std))
        return cls((1 / (255 * stds)).float(), (-means / stds).float())

    def to(self, device: torch.device | str) -> Self:
        return type(self)(self.scale.to(device), self.offset.to(device))

    def __call__(self, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return uint8 images [n, C, H, W] normalised, in channels-last memory, with which convolutions are faster.

        Raises ValueError for images of another type or another number of channels.
        """
        n, channels, height, width = images.shape
        if images.dtype != torch.uint8 or channels != len(self.scale):
            raise ValueError(
                f"cannot normalise {images.dtype} images of {channels} channels: give uint8 "
                f"images of {len(self.scale)} channels, or a mean and std for each channel"
            )
        # Rearrange bytes first, then scale along one long axis: twice as fast on a CPU.
        # Scale in float32: a half-precision scale has an error of up to 0.4 %.
        values = images.permute(0, 2, 3, 1).reshape(n, -1).float()
        scale, offset = (t.repeat(height * width) for t in (self.scale, self.offset))
        torch.addcmul(offset, values, scale, out=values)
        return values.to(dtype).view(n, height, width, channels).permute(0, 3, 1, 2)
