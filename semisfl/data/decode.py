"""Encoded images to one uint8 array.

Decoding is shared by every source: formats are allow-listed, sizes are known from the headers
before anything is decoded, and images that cannot be read are left out, counted and named.
"""

import io
import os
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import ExifTags, Image, ImageOps

# TIFF and the rarer formats are left out on purpose: their decoders are Pillow's weak spot.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "PPM")
MAX_PIXELS = 64 * 2**20  # in one image: a small file can claim to be enormous
MAX_DECODED = 32 * 2**30  # bytes of the whole set
MAX_UNREADABLE = 0.05
GREY_MODES = {"1", "L", "LA", "I;16", "I;16B", "I;16L"}
CHUNK = 256

T = TypeVar("T")
Size = tuple[int, int]
"""Height and width."""


@dataclass(frozen=True)
class Rows:
    """Images as a source lists them before any is decoded: training ones first, then test."""

    names: Sequence[str]
    open: Callable[[int], Image.Image]  # reads the header only
    labels: np.ndarray  # int64; -1 unknown
    trains: int  # rows before this one are for training
    classes: tuple[str, ...]
    holders: tuple[str, ...] = ()  # client folders
    holder: np.ndarray | None = None  # int64 row -> holders; -1 nobody
    notes: tuple[str, ...] = ()
    pixels: np.ndarray | None = None  # uint8 [n, C, H, W] where nothing needs decoding


@dataclass(frozen=True)
class Decoded:
    """The rows that could be read, as they are cached."""

    images: np.ndarray  # uint8 [n, C, H, W]
    labels: np.ndarray
    trains: int
    classes: tuple[str, ...]
    holders: tuple[str, ...]
    holder: np.ndarray
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """Where images are: the files that make a cached copy stale, and how to list them."""

    name: str
    files: tuple[Path, ...]  # none: reading them is as fast as reading a cache
    rows: Callable[[], Rows]


def open_image(data: bytes | Path) -> Image.Image:
    """The header, checked; pixels are decoded on use."""
    image = Image.open(io.BytesIO(data) if isinstance(data, bytes) else data, formats=FORMATS)
    # 32-bit pixels (modes I and F) have no defined range to bring to 0..255.
    if image.width * image.height > MAX_PIXELS or image.mode in ("I", "F"):
        image.close()
        raise ValueError(f"a {image.width}x{image.height} image of mode {image.mode} is not read")
    return image


def decode(rows: Rows, size: Size | None, channels: int | None) -> Decoded:
    """All readable rows at one ``size``, height and width, or at the most common size of the set.

    ``channels`` is 1 or 3; None means 1 where every image is grey.
    """
    if not len(rows.labels):
        raise ValueError("there are no images")
    fits = rows.pixels is not None and size in (None, rows.pixels.shape[2:])
    if rows.pixels is not None and fits and channels in (None, rows.pixels.shape[1]):
        images, kept = rows.pixels, np.ones(len(rows.labels), bool)
        notes: tuple[str, ...] = ()
    else:
        images, kept, notes = _render(rows, size, channels)
    holder = rows.holder if rows.holder is not None else np.full(len(kept), -1, np.int64)
    return Decoded(
        images=images if kept.all() else images[kept],
        labels=rows.labels[kept],
        trains=int(kept[: rows.trains].sum()),
        classes=rows.classes,
        holders=rows.holders,
        holder=holder[kept],
        notes=(*rows.notes, *notes),
    )


def _render(
    rows: Rows, size: Size | None, channels: int | None
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """(images, which of them were readable, notes)."""
    count = len(rows.labels)
    headers = _parallel(lambda row: _header(rows, row), count)
    known = [header for header in headers if header]
    _check_readable(rows, np.array([header is not None for header in headers]))
    sizes = Counter(shape for shape, _ in known)
    # Ties go to the larger image, so that the outcome does not depend on the order of files.
    width, height = size[::-1] if size else max(sizes, key=lambda s: (sizes[s], s))
    channels = channels or (1 if all(mode in GREY_MODES for _, mode in known) else 3)
    needed = count * channels * width * height
    if needed > MAX_DECODED:
        raise ValueError(
            f"{count} images of {width}x{height} take {needed / 2**30:.0f} GiB decoded, above the "
            f"limit of {MAX_DECODED >> 30} GiB; give a smaller size, e.g. size = 96"
        )
    images = np.empty((count, channels, height, width), np.uint8)

    def fill(row: int) -> bool:
        pixels = decoded(rows, row, (width, height), channels) if headers[row] else None
        if pixels is not None:
            images[row] = pixels
        return pixels is not None

    kept = np.array(_parallel(fill, count), bool)
    notes = _check_readable(rows, kept)
    other = len(known) - sizes[width, height]
    if other:
        notes += (
            f"{other} of {count} images had another size and were resized to {width}x{height}",
        )
    return images, kept, notes


def _parallel(job: Callable[[int], T], count: int) -> list[T]:
    """``job`` of every row, in order; Pillow releases the GIL while it decodes."""

    def chunk(start: int) -> list[T]:
        return [job(row) for row in range(start, min(start + CHUNK, count))]

    with (
        warnings.catch_warnings(),
        ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool,
    ):
        # Stricter limits and our own notes stand in for what Pillow warns of.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        warnings.simplefilter("ignore", UserWarning)
        return [done for part in pool.map(chunk, range(0, count, CHUNK)) for done in part]


def _header(rows: Rows, row: int) -> tuple[tuple[int, int], str] | None:
    """(size as seen upright, mode), or None where the image cannot be opened."""
    try:
        with rows.open(row) as image:
            turned = image.getexif().get(ExifTags.Base.Orientation, 1) >= 5
            return (image.height, image.width) if turned else image.size, image.mode
    except Exception:  # a damaged file can raise nearly anything inside a decoder
        return None


def decoded(rows: Rows, row: int, size: tuple[int, int], channels: int) -> np.ndarray | None:
    """uint8 [C, H, W], or None where the image cannot be decoded."""
    try:
        with rows.open(row) as image:
            return pixels_of(image, size, channels)
    except Exception:  # as above
        return None


def pixels_of(image: Image.Image, size: tuple[int, int], channels: int) -> np.ndarray:
    """uint8 [C, H, W]: upright, in 1 or 3 channels, at ``size``."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    image = image.convert("L" if channels == 1 else "RGB")
    if image.size != size:
        image = image.resize(size, Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def _check_readable(rows: Rows, kept: np.ndarray) -> tuple[str, ...]:
    """A note that counts and names what could not be read; an error above the limit."""
    lost = np.flatnonzero(~kept)
    if not lost.size:
        return ()
    first = ", ".join(rows.names[row] for row in lost[:5]) + (", ..." if lost.size > 5 else "")
    found = f"{lost.size} of {kept.size} images could not be read"
    if lost.size > MAX_UNREADABLE * kept.size:
        raise ValueError(
            f"{found}, above the limit of {MAX_UNREADABLE:.0%}: {first}; remove or replace them "
            f"(formats read: {', '.join(FORMATS)})"
        )
    return (f"{found} and were left out: {first}",)
