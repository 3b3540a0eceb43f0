"""Decode images to one uint8 array.

Every source of images (folders, CSV files, ``.npz`` files, Hugging Face and torch data sets) lists its
images as a `Listing`, and `decode` makes one array of them. Formats are allow-listed. Sizes are read from
the headers before any pixels are decoded. Images that cannot be read are left out, counted and named.
"""

import io
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "PPM", "TIFF")
MAX_UNREADABLE = 0.05
"""The largest share of a set's images that may be unreadable."""
LARGE = 2**22
"""Pixels above which an image is decoded alone, and a JPEG at a fraction of its size."""
MAX_PIXELS = 2**26
"""Most pixels of an image. Pillow's own limit of 178 million holds for a JPEG, which need not be decoded whole."""
GAP = 2
"""How many times larger than needed a large JPEG is decoded, so that resizing stays smooth."""
SIXTEEN_BIT_MODES = {"I;16", "I;16B", "I;16L"}
GREY_MODES = {"1", "L", "LA", *SIXTEEN_BIT_MODES}
CHUNK = 256
"""Images per task of a decoding thread, and per copy."""
MADE_GREY = "%d of %d images are stored in colour and were read as grey ones"

T = TypeVar("T")
Size = tuple[int, int]
"""Height and width in pixels."""
Allocate = Callable[[tuple[int, int, int, int]], np.ndarray]
"""Makes the uint8 array [n, C, H, W] that images are decoded into."""

_large_images = threading.Lock()


@dataclass(frozen=True)
class Listing:
    """The images of a source before any pixels are decoded: training images first, then test images."""

    names: Sequence[str]
    """One name per image, for messages."""
    open: Callable[[int], Image.Image]
    """Opens the image at a position, and reads its header only."""
    labels: np.ndarray
    """int64 [n]; -1: unknown."""
    trains: int
    """The number of training images."""
    classes: tuple[str, ...]
    holders: tuple[str, ...] = ()
    """Names of the clients that hold images, if the source says so."""
    holder: np.ndarray | None = None
    """int64 [n]: the index in ``holders`` of the client that holds the image; -1: none."""
    notes: tuple[str, ...] = ()
    """Remarks for the user, one line each."""
    pixels: np.ndarray | None = None
    """uint8 [n, C, H, W], where the images are arrays already."""


@dataclass(frozen=True)
class Decoded:
    """The images of a `Listing` that could be read, with the same fields."""

    images: np.ndarray
    """uint8 [n, C, H, W]"""
    labels: np.ndarray
    trains: int
    classes: tuple[str, ...]
    holders: tuple[str, ...]
    holder: np.ndarray
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """A place of images: a name, the files that make it, and the function that lists its images."""

    name: str
    files: tuple[Path, ...]
    """A change of these files makes a cached copy stale; empty: there is nothing to cache."""
    listing: Callable[[], Listing]


class Unsupported(ValueError):
    """Raised for an image that is whole, but too large or of a kind that cannot be used."""


def open_image(data: bytes | Path) -> Image.Image:
    """Open an encoded image and read its header; its pixels are decoded on first use.

    Raises `Unsupported` for more pixels than `MAX_PIXELS` or a mode without a known range, and Pillow's
    errors for damaged files and unknown formats.
    """
    with warnings.catch_warnings():
        # Our own limit replaces Pillow's warning.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        image = Image.open(io.BytesIO(data) if isinstance(data, bytes) else data, formats=FORMATS)
    try:
        if image.format != "JPEG" and image.width * image.height > MAX_PIXELS:
            raise Unsupported(
                f"a {image.width}x{image.height} {image.format} has more than {MAX_PIXELS >> 20} Mi pixels; "
                "make it smaller"
            )
        check_mode(image)
    except Unsupported:
        image.close()
        raise
    return image


def check_mode(image: Image.Image) -> None:
    """Raise `Unsupported` for 32-bit pixels (modes I and F), which have no known range to bring to 0..255."""
    if image.mode in ("I", "F") and not _is_sixteen_bit(image):
        raise Unsupported(
            f"an image of mode {image.mode} has 32-bit pixels, whose range is not known; convert it to 8 or 16 bits"
        )


def _is_sixteen_bit(image: Image.Image) -> bool:
    """Return whether grey values run to 65,535.

    Pillow opens such a PGM in mode I, and its older versions such a PNG.
    """
    return image.mode in SIXTEEN_BIT_MODES or (image.mode == "I" and image.format in ("PNG", "PPM"))


def is_colour(image: Image.Image) -> bool:
    """Return whether an image is stored in colour, as it also is with grey pixels alone."""
    return image.mode not in GREY_MODES and not _is_sixteen_bit(image)


def reason(error: Exception) -> str:
    """Return in one line why an image cannot be read, from the error that opening or decoding it raised."""
    if isinstance(error, UnidentifiedImageError):
        return f"it is no image of {', '.join(FORMATS)}"
    text = " ".join(str(error).split())
    if isinstance(error, ValueError):
        return text
    if isinstance(error, OSError):
        return error.strerror or text
    return f"it is damaged: {text}"


def decode(
    listing: Listing, size: Size | None, channels: int | None, allocate: Allocate | None = None
) -> Decoded:
    """Return all readable images of a listing in one size and with one number of channels.

    ``size``: height and width; None: the most common size. ``channels``: 1 or 3; None: 1 if every image
    is grey, else 3. ``allocate`` makes the array for the images; None: in memory.

    Raises ValueError if there are no images, or more than `MAX_UNREADABLE` of them cannot be read.
    """
    if not len(listing.labels):
        raise ValueError("there are no images")
    pixels, kept = listing.pixels, np.ones(len(listing.labels), bool)
    notes: tuple[str, ...] = ()
    fits = pixels is not None and size in (None, pixels.shape[2:])
    if pixels is None or not fits or channels not in (None, pixels.shape[1]):
        allocate = allocate or (lambda shape: np.empty(shape, np.uint8))
        pixels, kept, notes = _render(listing, size, channels, allocate)
    holder = listing.holder if listing.holder is not None else np.full(len(kept), -1, np.int64)
    return Decoded(
        images=pixels,
        labels=listing.labels[kept],
        trains=int(kept[: listing.trains].sum()),
        classes=listing.classes,
        holders=listing.holders,
        holder=holder[kept],
        notes=(*listing.notes, *notes),
    )


def _render(
    listing: Listing, size: Size | None, channels: int | None, allocate: Allocate
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Return the readable images, which of all images these are, and notes."""
    count = len(listing.labels)
    errors: dict[int, Exception] = {}

    def attempt(place: int, job: Callable[[Image.Image], T]) -> T | None:
        try:
            with listing.open(place) as image:
                return job(image)
        except Exception as error:  # a damaged file can raise nearly anything inside a decoder
            errors[place] = error
            return None

    headers = _parallel(lambda place: attempt(place, _header), count)
    _unreadable(listing, errors)
    known = [header for header in headers if header]
    sizes = Counter(shape for shape, _ in known)
    # Ties go to the larger image, so that the outcome does not depend on the order of files.
    width, height = size[::-1] if size else max(sizes, key=lambda s: (sizes[s], s))
    depth = channels or (3 if any(colour for _, colour in known) else 1)
    images = allocate((count, depth, height, width))

    def fill(place: int) -> None:
        if place not in errors:
            pixels = attempt(place, lambda image: pixels_of(image, (width, height), depth))
            images[place] = 0 if pixels is None else pixels

    _parallel(fill, count)
    kept = np.array([place not in errors for place in range(count)])
    notes = _unreadable(listing, errors)
    read = [header for header, good in zip(headers, kept, strict=True) if header and good]
    other = sum(shape != (width, height) for shape, _ in read)
    if other and size is None:
        notes += (
            f"{other} of {count} images had another size and were resized to {width}x{height}",
        )
    if channels == 1 and (made_grey := sum(colour for _, colour in read)):
        notes += (MADE_GREY % (made_grey, count),)
    return _without_gaps(images, kept), kept, notes


def _without_gaps(images: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Move the ``kept`` images to the front in place, as they may not fit in memory, and return them."""
    places = np.flatnonzero(kept)
    if len(places) < len(images):
        for first in range(0, len(places), CHUNK):
            some = places[first : first + CHUNK]
            images[first : first + len(some)] = images[some]
    return images[: len(places)]


def _parallel(job: Callable[[int], T], count: int) -> list[T]:
    """Return ``job`` of every image, in order. Pillow releases the GIL while it decodes."""

    def chunk(start: int) -> list[T]:
        return [job(place) for place in range(start, min(start + CHUNK, count))]

    with (
        warnings.catch_warnings(),
        ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool,
    ):
        # Our own limits and notes replace Pillow's warnings.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        warnings.simplefilter("ignore", UserWarning)
        return [done for part in pool.map(chunk, range(0, count, CHUNK)) for done in part]


def _alone(image: Image.Image) -> AbstractContextManager[Any]:
    """Return a lock that lets one thread at a time decode a large image, because a few of them fill a memory."""
    return _large_images if image.width * image.height > LARGE else nullcontext()


def _header(image: Image.Image) -> tuple[tuple[int, int], bool]:
    """Return the width and height as seen upright, and whether the image is in colour."""
    with _alone(image):  # Pillow decodes a PNG to look for EXIF data behind its pixels
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    # Pillow turns a TIFF by itself.
    turned = orientation >= 5 and image.format != "TIFF"
    return image.size[::-1] if turned else image.size, is_colour(image)


def pixels_of(image: Image.Image, size: tuple[int, int], channels: int) -> np.ndarray:
    """Return uint8 [C, H, W]: upright, in 1 or 3 ``channels``, at ``size`` (width, height)."""
    if image.width * image.height > LARGE:  # a JPEG's decoder can skip pixels; others ignore this
        image.draft(None, (GAP * max(size), GAP * max(size)))
    with _alone(image):
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


def _unreadable(listing: Listing, errors: dict[int, Exception]) -> tuple[str, ...]:
    """Return a note that counts and names unreadable images; raise ValueError above the limit."""
    if not errors:
        return ()
    lost, count = sorted(errors), len(listing.labels)
    first = ", ".join(listing.names[place] for place in lost[:5]) + ", ..." * (len(lost) > 5)
    why = f"{first} ({listing.names[lost[0]]}: {reason(errors[lost[0]])})"
    if len(lost) > MAX_UNREADABLE * count:
        raise ValueError(
            f"{len(lost)} of {count} images could not be read, above the limit of {MAX_UNREADABLE:.0%}: {why}; "
            "remove or replace them"
        )
    return (f"{len(lost)} of {count} images could not be read and were left out: {why}",)
