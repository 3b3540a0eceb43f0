"""Read image files at the model's size; files that cannot be read are listed with the reason."""

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageChops
from torch import Tensor

from semisfl.data import folder
from semisfl.data.decode import GREY_MODES, check_mode, open_image, pixels_of, reason
from semisfl.models.shapes import Shape

Picture = str | os.PathLike[str] | Image.Image
"""A file, or an image that Pillow has opened."""
CHUNK = 64
"""Most images that are in memory at a time."""
DIGITS = 32
"""Hexadecimal digits of an image's digest."""


class Skipped(NamedTuple):
    image: str
    reason: str


def files_of(places: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Return the named files, and for a folder every image file below it that is not hidden, in order."""
    files: list[Path] = []
    for place in map(Path, places):
        if not place.is_dir():
            files.append(place)
            continue
        inside = sorted(folder.images_below(place))
        if not inside:
            raise ValueError(
                f"{place} holds no images ({', '.join(sorted(folder.SUFFIXES))}); name another folder"
            )
        files += inside
    return files


class Batch(NamedTuple):
    """Pictures that could be read, and those among them that could not."""

    names: list[str]
    images: Tensor
    """uint8 [n, C, H, W]"""
    skipped: list[Skipped]


def batches(pictures: Sequence[Picture], shape: Shape, size: int = CHUNK) -> Iterator[Batch]:
    """Yield batches of ``size`` pictures, so that any number fits in memory."""
    for first in range(0, len(pictures), size):
        names, pixels, skipped = [], [], []
        for number, picture in enumerate(pictures[first : first + size], start=first):
            name = name_of(picture, number)
            try:
                pixels.append(read(picture, shape))
                names.append(name)
            except ValueError as error:
                skipped.append(Skipped(name, str(error)))
        stacked = np.stack(pixels) if pixels else np.empty((0, *shape), np.uint8)
        yield Batch(names, torch.from_numpy(stacked), skipped)


def name_of(picture: Picture, number: int) -> str:
    if isinstance(picture, Image.Image):
        return str(getattr(picture, "filename", "") or f"image {number}")
    return os.fspath(picture)


def content_digest(picture: Picture | Tensor) -> str:
    """Return a digest of what a picture holds: a file's bytes, whatever its name, or pixels.

    A file that cannot be read has the digest of its name: it will be skipped.
    """
    content: bytes
    if isinstance(picture, Tensor):
        content = picture.contiguous().numpy().tobytes()
    elif isinstance(picture, Image.Image):
        content = picture.tobytes()
    else:
        content = os.fsencode(picture)
        with contextlib.suppress(OSError):
            if Path(picture).is_file():  # opening a pipe would wait for its writer
                with open(picture, "rb") as file:
                    return hashlib.file_digest(file, "sha256").hexdigest()[:DIGITS]
    return hashlib.sha256(content).hexdigest()[:DIGITS]


def read(picture: Picture, shape: Shape) -> np.ndarray:
    """Return a picture as uint8 of ``shape``; `ValueError` gives the reason if it cannot be read."""
    channels, height, width = shape
    try:
        if isinstance(picture, Image.Image):
            check_mode(picture)
            return _pixels(picture, (width, height), channels)
        path = Path(picture)
        if not path.exists():
            raise ValueError("there is no such file")
        if not path.is_file():
            raise ValueError("it is no regular file")
        with open_image(path) as image:
            return _pixels(image, (width, height), channels)
    except Exception as error:  # a damaged file can raise nearly anything inside a decoder
        raise ValueError(reason(error)) from error


def _pixels(image: Image.Image, size: tuple[int, int], channels: int) -> np.ndarray:
    # Grey images become colour without loss, as in training; colour images are never made grey.
    if channels == 1 and image.mode not in GREY_MODES and not _is_grey(image):
        raise ValueError(
            f"it is in colour (mode {image.mode}) and the model was trained on grey images; convert it"
        )
    return pixels_of(image, size, channels)


def _is_grey(image: Image.Image) -> bool:
    """Return whether a colour image has only grey pixels."""
    red, green, blue = image.convert("RGB").split()
    pairs = ((red, green), (green, blue))
    return all(ImageChops.difference(*pair).getbbox() is None for pair in pairs)
