"""The fourteen operations of strong augmentation: (images, signed level of each) -> images.

Images are uint8 [n, C, H, W]; levels are int8 [n] from -9 to 9 without 0, and operations without a direction
ignore the sign. Each operation gives the same result as Pillow, on whole batches, without waiting for the device.
"""

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

MAX_LEVEL = 9
LEVELS = 2 * MAX_LEVEL + 1
AFFINE = 5
"""Operations that move pixels; each keeps a table of all its levels for one size of images."""
TABLE_PIXELS = 2**16
"""Most pixels of an image for which tables are kept."""


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Return an array as a tensor on a device, copied without waiting."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


def _per_image(values: np.ndarray, images: Tensor) -> Tensor:
    """Return one value per image, shaped to broadcast over its channels and pixels."""
    return to_device(values, images.device).view(-1, 1, 1, 1)


def _blend(plain: Tensor | int, images: Tensor, levels: np.ndarray) -> Tensor:
    """Return Pillow's enhancement: plain + factor * (image - plain) in float32, truncated."""
    factor = (0.09 * np.abs(levels.astype(np.float64)) + 0.05).astype(np.float32)
    change = images.float()
    change.sub_(plain).mul_(_per_image(factor, images)).add_(plain)
    return change.to(torch.uint8)


def _luma(images: Tensor) -> Tensor:
    """Return greyscale as Pillow converts; its 16-bit fixed point fits float32 exactly (< 2**24)."""
    if images.shape[1] == 1:
        return images.float()
    red, green, blue = (images[:, channel : channel + 1].float() for channel in range(3))
    total = red.mul_(19595).add_(green, alpha=38470).add_(blue, alpha=7471).add_(0x8000)
    return total.mul_(2.0**-16).floor_()


def _look_up(tables: Tensor, images: Tensor) -> Tensor:
    """Replace every grey value by its entry in the table [n, C, 256] of its image and channel."""
    return tables.gather(2, images.flatten(2).long()).view_as(images)


def _autocontrast(images: Tensor, levels: np.ndarray) -> Tensor:
    """Stretch each channel's values to 0..255."""
    pixels = images.flatten(2)
    low = pixels.amin(2, keepdim=True).double()
    span = pixels.amax(2, keepdim=True).double() - low
    # A channel with a single value stays unchanged. Pillow divides, multiplies and adds in doubles,
    # then truncates; `255.0 / span` multiplies by a reciprocal and differs in the last bit.
    flat = span == 0
    scale = torch.full_like(span, 255).div_(span).masked_fill_(flat, 1.0)
    offset = (-low * scale).masked_fill_(flat, 0.0)
    greys = torch.arange(256, device=images.device, dtype=torch.float64)
    tables = (greys * scale).add_(offset).clamp_(0, 255).to(torch.uint8)
    return _look_up(tables, images)


def _equalize(images: Tensor, levels: np.ndarray) -> Tensor:
    """Give each channel a uniform histogram."""
    pixels = images.flatten(2)
    one = torch.ones((), dtype=torch.int32, device=images.device).expand(pixels.shape)
    counts = torch.zeros(*pixels.shape[:2], 256, dtype=torch.int32, device=images.device)
    counts.scatter_add_(2, pixels.long(), one)
    last = counts.gather(2, pixels.amax(2, keepdim=True).long())
    step = (pixels.shape[2] - last) // 255
    below = counts.cumsum(2, dtype=torch.int32) - counts
    tables = ((below + step // 2) // step.clamp(min=1)).clamp_(max=255)
    # If fewer than 255 pixels differ from the brightest value, Pillow leaves the channel unchanged.
    greys = torch.arange(256, device=images.device, dtype=torch.int32)
    return _look_up(torch.where(step == 0, greys, tables).to(torch.uint8), images)


def identity(images: Tensor, levels: np.ndarray) -> Tensor:
    return images


def _brightness(images: Tensor, levels: np.ndarray) -> Tensor:
    return _blend(0, images, levels)


def _color(images: Tensor, levels: np.ndarray) -> Tensor:
    return images if images.shape[1] == 1 else _blend(_luma(images), images, levels)


def _contrast(images: Tensor, levels: np.ndarray) -> Tensor:
    count = images.shape[2] * images.shape[3]
    total = _luma(images).sum((1, 2, 3), dtype=torch.float64, keepdim=True).long()
    return _blend((2 * total + count) // (2 * count), images, levels)


def _sharpness(images: Tensor, levels: np.ndarray) -> Tensor:
    # Sums over flat pixels cross the ends of rows, but only in the border columns, which are kept
    # as they were: long runs are several times faster than one short run per row.
    width, smooth = images.shape[3], images.float()
    flat = smooth.flatten(2)
    across = flat[..., :-2] + flat[..., 1:-1] + flat[..., 2:]
    total = across[..., : -2 * width] + across[..., width:-width] + across[..., 2 * width :]
    total.add_(flat[..., width + 1 : -width - 1], alpha=4)
    # Pillow's SMOOTH divides by 13 and rounds; ties cannot occur, so float32 is safe.
    flat[..., width + 1 : -width - 1] = total.mul_(1 / 13).add_(0.5).floor_()
    smooth[..., :1], smooth[..., -1:] = images[..., :1], images[..., -1:]
    return _blend(smooth, images, levels)


def _posterize(images: Tensor, levels: np.ndarray) -> Tensor:
    """Keep the highest bits of a value: 4 at level 1, up to 7 at level 9."""
    dropped = 4 - np.abs(levels.astype(np.int64)) * 4 // 10
    return images & _per_image((0xFF << dropped & 0xFF).astype(np.uint8), images)


def _solarize(images: Tensor, levels: np.ndarray) -> Tensor:
    """Invert values from a threshold on, which falls with the level."""
    thresholds = 256 - np.abs(levels.astype(np.int64)) * 256 // 10
    bright = images >= _per_image(thresholds.astype(np.uint8), images)
    return images ^ bright.view(torch.uint8).neg()  # 255 - x where bright; faster than `where`


def _rotate(level: int, height: int, width: int) -> tuple[float, ...]:
    """Rotate by 3 degrees per level around the centre of the image."""
    angle = -math.radians(3 * level % 360)
    cos, sin = round(math.cos(angle), 15), round(math.sin(angle), 15)
    x, y = width / 2, height / 2
    return cos, sin, -cos * x - sin * y + x, -sin, cos, sin * x - cos * y + y


def _shear_x(level: int, height: int, width: int) -> tuple[float, ...]:
    """Move every row sideways, by 0.03 pixels per level and row from the top."""
    return 1, 0.03 * level, 0, 0, 1, 0


def _shear_y(level: int, height: int, width: int) -> tuple[float, ...]:
    return 1, 0, 0, 0.03 * level, 1, 0


def _translate_x(level: int, height: int, width: int) -> tuple[float, ...]:
    """Move by 3 % of the width per level, in whole pixels."""
    return 1, 0, int(math.copysign(3 * abs(level) * width // 100, level)), 0, 1, 0


def _translate_y(level: int, height: int, width: int) -> tuple[float, ...]:
    return 1, 0, 0, 0, 1, int(math.copysign(3 * abs(level) * height // 100, level))


Matrix = Callable[[int, int, int], tuple[float, ...]]
"""(level, height, width) -> the six coefficients that map an output pixel to its source."""


def _source(
    matrix: Matrix, level: int, height: int, width: int, rows: slice
) -> tuple[np.ndarray, np.ndarray]:
    """Return the flat source pixel of each pixel of some output rows, and 0 where it lies outside.

    This is Pillow's nearest-neighbour affine transform: 16.16 fixed point, from pixel centres.
    """
    y, x = np.arange(height)[rows, None], np.arange(width)
    a, b, c, d, e, f = matrix(level, height, width)
    c, f = c + (a + b) / 2, f + (d + e) / 2
    a, b, c, d, e, f = (math.floor(value * 65536 + 0.5) for value in (a, b, c, d, e, f))
    column, row = (c + a * x + b * y) >> 16, (f + d * x + e * y) >> 16
    valid = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    return np.where(valid, row * width + column, 0).ravel(), valid.astype(np.uint8).ravel()


@lru_cache(maxsize=AFFINE)
def _sources(
    matrix: Matrix, height: int, width: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return `_source` of the whole image for every level -9..9."""
    index = np.empty((LEVELS, height * width), np.int64)
    inside = np.empty((LEVELS, height * width), np.uint8)
    for place in range(LEVELS):
        source = _source(matrix, place - MAX_LEVEL, height, width, slice(None))
        index[place], inside[place] = source
    return to_device(index, device), to_device(inside, device)


def _affine(matrix: Matrix) -> "Operation":
    """Return the operation that moves every pixel as ``matrix`` says for its image's level."""

    def apply(images: Tensor, levels: np.ndarray) -> Tensor:
        height, width = images.shape[2:]
        if height * width > TABLE_PIXELS:
            return _moved_by_rows(matrix, images, levels)
        index, inside = _sources(matrix, height, width, images.device)
        choice = to_device(levels.astype(np.int64) + MAX_LEVEL, images.device)
        source = index.index_select(0, choice)[:, None].expand(-1, images.shape[1], -1)
        moved = images.flatten(2).gather(2, source)
        return moved.mul_(inside.index_select(0, choice)[:, None]).view_as(images)

    return apply


def _moved_by_rows(matrix: Matrix, images: Tensor, levels: np.ndarray) -> Tensor:
    """Move large images a few rows at a time: tables of them would take too much memory."""
    height, width = images.shape[2:]
    pixels, out = images.flatten(2), torch.empty_like(images).flatten(2)
    step = max(1, TABLE_PIXELS // width)
    for level in np.unique(levels):
        places = to_device(np.flatnonzero(levels == level), images.device)
        chosen = pixels.index_select(0, places)
        for first in range(0, height, step):
            source = _source(matrix, int(level), height, width, slice(first, first + step))
            index, inside = (to_device(one, images.device) for one in source)
            moved = chosen.gather(2, index.expand(*chosen.shape[:2], -1)).mul_(inside)
            out[places, :, first * width : first * width + len(index)] = moved
    return out.view_as(images)


Operation = Callable[[Tensor, np.ndarray], Tensor]

OPERATIONS: dict[str, Operation] = {
    "autocontrast": _autocontrast,
    "equalize": _equalize,
    "identity": identity,
    "brightness": _brightness,
    "color": _color,
    "contrast": _contrast,
    "sharpness": _sharpness,
    "posterize": _posterize,
    "rotate": _affine(_rotate),
    "shear_x": _affine(_shear_x),
    "shear_y": _affine(_shear_y),
    "solarize": _solarize,
    "translate_x": _affine(_translate_x),
    "translate_y": _affine(_translate_y),
}
