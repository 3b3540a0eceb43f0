"""Decode images to one uint8 array.

Every source shares this code. Formats are allow-listed. Sizes are read from the headers before
anything is decoded. Images that cannot be read are left out, counted and named.
"""

import io
import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image, ImageOps, JpegImagePlugin

from semisfl.data.large import TooLarge, check_pixels, shrunk, sides, turn

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "PPM", "TIFF")
MAX_UNREADABLE = 0.05
SIXTEEN_BIT_MODES = {"I;16", "I;16B", "I;16L"}
GREY_MODES = {"1", "L", "LA", *SIXTEEN_BIT_MODES}
CHUNK = 256
MADE_GREY = "%d of %d images are stored in colour and were read as grey ones"

log = logging.getLogger(__name__)

T = TypeVar("T")
Size = tuple[int, int]
"""Height and width."""
Allocate = Callable[[tuple[int, int, int, int]], np.ndarray]
"""Makes the uint8 array of a shape that images are decoded into."""


@dataclass(frozen=True)
class Listing:
    """Images as a source lists them before any is decoded: training images first, then test images."""

    names: Sequence[str]
    open: Callable[[int], Image.Image]  # reads the header only
    labels: np.ndarray  # int64; -1 unknown
    trains: int  # images before this one are for training
    classes: tuple[str, ...]
    holders: tuple[str, ...] = ()  # client folders
    holder: np.ndarray | None = None  # int64, for each image its place in holders; -1 nobody
    notes: tuple[str, ...] = ()
    pixels: np.ndarray | None = None  # uint8 [n, C, H, W] where nothing needs decoding


@dataclass(frozen=True)
class Decoded:
    """The images that could be read, as they are cached."""

    images: np.ndarray  # uint8 [n, C, H, W]
    labels: np.ndarray
    trains: int
    classes: tuple[str, ...]
    holders: tuple[str, ...]
    holder: np.ndarray
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """A place of images: the files whose change makes a cached copy stale, and how to list the images."""

    name: str
    files: tuple[Path, ...]  # none: reading them is as fast as reading a cache
    listing: Callable[[], Listing]


def open_image(data: bytes | Path) -> Image.Image:
    """Open an image and check its header; pixels are decoded on use."""
    image = _opened(data)
    try:
        check_pixels(image)
        check_mode(image)
    except ValueError:
        image.close()
        raise
    return image


class Unsupported(ValueError):
    """Raised for an image that is whole, but whose values cannot be used."""


def check_mode(image: Image.Image) -> None:
    """Raise `Unsupported` for 32-bit pixels (modes I and F), which have no known range to bring to 0..255."""
    if image.mode in ("I", "F") and not _is_sixteen_bit(image):
        raise Unsupported(
            f"an image of mode {image.mode} has 32-bit pixels, whose range is not known; convert it to 8 or 16 bits"
        )


def _opened(data: bytes | Path) -> Image.Image:
    source = io.BytesIO(data) if isinstance(data, bytes) else data
    with warnings.catch_warnings():
        # Our own limits replace what Pillow warns of.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            return Image.open(source, formats=FORMATS)
        except Image.DecompressionBombError:
            # Pillow looks at the number of pixels alone, and a JPEG need not be decoded whole.
            start = data[:3] if isinstance(data, bytes) else _first_bytes(data)
            if start != b"\xff\xd8\xff":
                raise TooLarge("it has more than 178 million pixels; make it smaller") from None
            return JpegImagePlugin.JpegImageFile(
                io.BytesIO(data) if isinstance(data, bytes) else data
            )


def _first_bytes(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(3)


def _is_sixteen_bit(image: Image.Image) -> bool:
    """Return whether grey values run to 65,535.

    Pillow opens such a PGM in mode I, and its older versions such a PNG.
    """
    return image.mode in SIXTEEN_BIT_MODES or (image.mode == "I" and image.format in ("PNG", "PPM"))


def in_colour(image: Image.Image) -> bool:
    """Return whether an image is stored in colour, as it also is with grey pixels alone."""
    return image.mode not in GREY_MODES and not _is_sixteen_bit(image)


def decode(
    listing: Listing, size: Size | None, channels: int | None, allocate: Allocate | None = None
) -> Decoded:
    """Return all readable images at one ``size`` (height, width), or at their most common size.

    ``channels`` is 1 or 3; None means 1 if every image is grey, else 3.
    """
    if not len(listing.labels):
        raise ValueError("there are no images")
    fits = listing.pixels is not None and size in (None, listing.pixels.shape[2:])
    if listing.pixels is not None and fits and channels in (None, listing.pixels.shape[1]):
        images, kept = listing.pixels, np.ones(len(listing.labels), bool)
        notes: tuple[str, ...] = ()
    else:
        images, kept, notes = _render(listing, size, channels, allocate or _in_memory)
    holder = listing.holder if listing.holder is not None else np.full(len(kept), -1, np.int64)
    return Decoded(
        images=images,
        labels=listing.labels[kept],
        trains=int(kept[: listing.trains].sum()),
        classes=listing.classes,
        holders=listing.holders,
        holder=holder[kept],
        notes=(*listing.notes, *notes),
    )


def _in_memory(shape: tuple[int, int, int, int]) -> np.ndarray:
    return np.empty(shape, np.uint8)


def _render(
    listing: Listing, size: Size | None, channels: int | None, allocate: Allocate
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Return the readable images, which of all images these are, and notes."""
    count = len(listing.labels)
    headers = _parallel(lambda place: _try_image(listing, place, _header), count)
    known = [header for header in headers if header]
    _check_readable(listing, np.array([header is not None for header in headers]))
    sizes = Counter(shape for shape, _ in known)
    # Ties go to the larger image, so that the outcome does not depend on the order of files.
    width, height = size[::-1] if size else max(sizes, key=lambda s: (sizes[s], s))
    to_grey = channels == 1
    channels = channels or (3 if any(colour for _, colour in known) else 1)
    images = allocate((count, channels, height, width))

    def fill(place: int) -> bool:
        if headers[place] is None:
            return False
        decoded = _try_image(listing, place, lambda one: pixels_of(one, (width, height), channels))
        if decoded is not None:
            images[place] = decoded
        return decoded is not None

    kept = np.array(_parallel(fill, count), bool)
    notes = _check_readable(listing, kept)
    read = [header for header, good in zip(headers, kept, strict=True) if header and good]
    if other := sum(shape != (width, height) for shape, _ in read):
        notes += (
            f"{other} of {count} images had another size and were resized to {width}x{height}",
        )
    if to_grey and (made_grey := sum(colour for _, colour in read)):
        notes += (MADE_GREY % (made_grey, count),)
    return _without_gaps(images, kept), kept, notes


def _without_gaps(images: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Move the ``kept`` images to the front, in place, and return them."""
    places = np.flatnonzero(kept)
    if len(places) < len(images):
        for first in range(0, len(places), CHUNK):
            images[first : first + CHUNK][: len(places) - first] = images[
                places[first : first + CHUNK]
            ]
    return images[: len(places)]


def _parallel(job: Callable[[int], T], count: int) -> list[T]:
    """Return ``job`` of every image, in order. Pillow releases the GIL while it decodes."""

    def chunk(start: int) -> list[T]:
        return [job(place) for place in range(start, min(start + CHUNK, count))]

    with (
        warnings.catch_warnings(),
        ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool,
    ):
        # Stricter limits and our own notes replace what Pillow warns of.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        warnings.simplefilter("ignore", UserWarning)
        return [done for part in pool.map(chunk, range(0, count, CHUNK)) for done in part]


def _try_image(listing: Listing, place: int, job: Callable[[Image.Image], T]) -> T | None:
    """Return ``job`` of an image, or None if it cannot be opened or decoded."""
    try:
        with listing.open(place) as image:
            return job(image)
    except TooLarge as error:
        log.warning("%.200r is left out: %s", listing.names[place], error)
    except Exception:  # a damaged file can raise nearly anything inside a decoder
        pass
    return None


def _header(image: Image.Image) -> tuple[tuple[int, int], bool]:
    """Return the width and height as seen upright, and whether the image is in colour."""
    width, height = sides(image)
    return (height, width) if turn(image) >= 5 else (width, height), in_colour(image)


def pixels_of(
    image: Image.Image, size: tuple[int, int], channels: int, room: int | None = None
) -> np.ndarray:
    """Return uint8 [C, H, W]: upright, in 1 or 3 channels, at ``size`` (width, height)."""
    image = shrunk(image, size, room)
    sixteen_bit = _is_sixteen_bit(image)
    image = ImageOps.exif_transpose(image)
    if sixteen_bit:
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode == "LAB":  # Pillow has no direct way from it to grey
        image = image.convert("RGB")
    image = image.convert("L" if channels == 1 else "RGB")
    if image.size != size:
        image = image.resize(size, Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def _check_readable(listing: Listing, kept: np.ndarray) -> tuple[str, ...]:
    """Return a note that counts and names unreadable images; raise above the limit."""
    lost = np.flatnonzero(~kept)
    if not lost.size:
        return ()
    first = ", ".join(listing.names[place] for place in lost[:5])
    first += ", ..." if lost.size > 5 else ""
    unreadable = f"{lost.size} of {kept.size} images could not be read"
    reason = next(filter(None, (_reason(listing, place) for place in lost[:5])), None)
    if lost.size > MAX_UNREADABLE * kept.size:
        formats = f"remove or replace them (formats read: {', '.join(FORMATS)})"
        raise ValueError(
            f"{unreadable}, above the limit of {MAX_UNREADABLE:.0%}: {first}; {reason or formats}"
        )
    return (f"{unreadable} and were left out: {first}" + (f"; {reason}" if reason else ""),)


def _reason(listing: Listing, place: int) -> str | None:
    """Return why an image that is whole cannot be used; None for any other."""
    try:
        listing.open(place).close()
    except Unsupported as error:
        return str(error)
    except Exception:  # as above
        return None
    return None
