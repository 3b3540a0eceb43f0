"""Decode large images within a bound: one at a time, and made smaller before anything copies them.

A file of 8 kB can hold 64 million pixels. Pillow keeps a decoded image in one to four bytes per pixel,
and each conversion makes a copy. Here strips of the image are converted and reduced instead.
"""

import contextlib
import threading
from math import ceil

import numpy as np
from PIL import ExifTags, Image

from semisfl.settings.counts import amount

LARGE = 2**22
"""Pixels above which an image is decoded alone."""
MAX_PIXELS = 64 * 2**20
"""Most pixels that are decoded of one image."""
MAX_JPEG = 2**28
"""Most pixels of a JPEG, whose decoder can leave out most of them (`draft`)."""
TILE_WIDTH, TILE_LENGTH, TILE_STEP = 322, 323, 16
"""Tags of a TIFF, and what the sides of its tiles are multiples of."""
STRIP = 2**20
"""Pixels that are converted at a time."""
GAP = 2
"""How many times larger than needed an image still is after `reduce`, so that resizing stays smooth."""
GREY = {"1", "L", "LA"}
SIXTEEN_BIT = {"I", "I;16", "I;16B", "I;16L"}
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""How an image is turned upright, by its EXIF orientation."""

_alone = threading.RLock()


class TooLarge(ValueError):
    """Raised for an image that takes more memory than it may."""


def check_pixels(image: Image.Image) -> None:
    """Raise `TooLarge` for an image that cannot be decoded within the bound, by its header."""
    most = MAX_JPEG if _drafts(image) else MAX_PIXELS
    if image.width * image.height > most:
        raise TooLarge(
            f"a {image.width}x{image.height} {image.format} has more than {most >> 20} Mi pixels; "
            "make it smaller"
        )
    # A TIFF is decoded in whole tiles, which may claim to be far larger than the image.
    tags = getattr(image, "tag_v2", {})
    tile = tags.get(TILE_WIDTH, 0) * tags.get(TILE_LENGTH, 0)
    if tile > max(LARGE, (image.width + TILE_STEP) * (image.height + TILE_STEP)):
        raise TooLarge(
            f"a {image.width}x{image.height} {image.format} has tiles of {tile} pixels; write it again "
            "with smaller ones"
        )


def _drafts(image: Image.Image) -> bool:
    """Return whether a decoder can skip pixels; it keeps all coefficients of a progressive JPEG."""
    return image.format == "JPEG" and not image.info.get("progressive")


def sides(image: Image.Image) -> tuple[int, int]:
    """Return the width and height that an image has once decoded, before it is turned upright."""
    if image.format == "TIFF" and _orientation(image) >= 5:
        # Pillow turns a TIFF as it decodes it, and some of its versions tell the size only then.
        tags = getattr(image, "tag_v2", {})
        return tags[ExifTags.Base.ImageLength], tags[ExifTags.Base.ImageWidth]
    return image.size


def turn(image: Image.Image) -> int:
    """Return the EXIF orientation by which a decoded image must still be turned; 1: upright."""
    return 1 if image.format == "TIFF" else _orientation(image)


def _orientation(image: Image.Image) -> int:
    # A PNG without EXIF data before its pixels is decoded, as some may follow them.
    with _alone if image.width * image.height > LARGE else contextlib.nullcontext():
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    return orientation if orientation in TURNS else 1


def shrunk(image: Image.Image, size: tuple[int, int], room: int | None = None) -> Image.Image:
    """Return a large image upright, grey or RGB, at ``GAP`` times ``size`` or more; others as they are.

    ``room``: bytes that decoding may take; `TooLarge` beyond.
    """
    if image.width * image.height <= LARGE:
        return image
    with _alone:
        if not _drafts(image):  # before `turn`, which may decode it
            _check_room(image, max(1, min(image.size) // (GAP * max(size))), room)
        turned = turn(image)
        wide, high = size[::-1] if turned >= 5 else size
        if _drafts(image):
            image.draft(None, (GAP * wide, GAP * high))
        width, height = sides(image)
        factor = max(1, min(width // (GAP * wide), height // (GAP * high)))
        _check_room(image, factor, room)
        small = _reduced(image, factor)
        return small.transpose(TURNS[turned]) if turned in TURNS else small


def _check_room(image: Image.Image, factor: int, room: int | None) -> None:
    pixels = image.width * image.height
    # As Pillow keeps it, with a decoder's own copy, and the small one.
    each = {1: 2, 2: 4}.get(len(image.getbands()), 8)
    needed = pixels * each + 8 * pixels // factor**2
    if pixels > MAX_PIXELS or (room is not None and needed > room):
        limit = "" if room is None else f" of {amount(room)} that are left"
        raise TooLarge(
            f"a {image.width}x{image.height} {image.format} takes {amount(needed)} to decode{limit}; "
            "make it smaller"
        )


def _reduced(image: Image.Image, factor: int) -> Image.Image:
    """Return the image in mode L or RGB, smaller by a whole ``factor``."""
    image.load()  # after which a TIFF is upright
    grey = image.mode in GREY or image.mode in SIXTEEN_BIT
    small = Image.new(
        "L" if grey else "RGB", (ceil(image.width / factor), ceil(image.height / factor))
    )
    rows = factor * max(1, STRIP // (factor * image.width))
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height)))
        if image.mode in SIXTEEN_BIT:
            strip = Image.fromarray((np.asarray(strip) >> 8).astype(np.uint8))
        small.paste(strip.convert(small.mode).reduce(factor), (0, top // factor))
    return small
