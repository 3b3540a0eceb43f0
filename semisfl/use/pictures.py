"""Read image files at a model's size, a batch at a time; files that cannot be read are listed with the reason."""

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from semisfl.data.decode import check_mode, open_image, pixels_of, reason
from semisfl.data.folder import SUFFIXES, images_below
from semisfl.models.shapes import Shape

Picture = str | os.PathLike[str] | Image.Image
"""A file, or an image that Pillow has opened."""
Pictures = Sequence[Picture] | Picture | Tensor | np.ndarray
"""Files, folders, Pillow images, or uint8 pixels [n, C, H, W] at the model's own size."""
ListedPictures = Sequence[Picture] | Tensor
"""The same, one by one."""
CHUNK = 64
"""Most images that are in memory at a time."""


class Skipped(NamedTuple):
    """An image that cannot be read, and why."""

    image: str
    reason: str


class Batch(NamedTuple):
    """Pictures that could be read, and those among them that could not."""

    names: list[str]
    images: Tensor
    """uint8 [n, C, H, W]"""
    skipped: list[Skipped]


def list_pictures(images: Pictures) -> ListedPictures:
    """Return every picture on its own; folders become the image files in them, as in `files_of`.

    Pixels stay one tensor, whose first axis counts the pictures.
    """
    if isinstance(images, np.ndarray):
        images = torch.from_numpy(np.ascontiguousarray(images))
    if isinstance(images, Tensor):
        return images
    listed: list[Picture] = []
    for one in [images] if isinstance(images, str | os.PathLike | Image.Image) else images:
        listed += [one] if isinstance(one, Image.Image) else files_of(Path(one))
    return listed


def files_of(place: Path) -> list[Path]:
    """Return a file, or for a folder every image file below it, sorted; names with a dot are skipped.

    Raises `ValueError` for a folder without images.
    """
    if not place.is_dir():
        return [place]
    if not (files := sorted(images_below(place))):
        raise ValueError(f"{place} holds no images ({', '.join(sorted(SUFFIXES))})")
    return files


def batches(pictures: ListedPictures, shape: Shape, size: int = CHUNK) -> Iterator[Batch]:
    """Read pictures in batches of ``size``, so that any number fits in memory.

    ``shape``: channels, height and width of the model's images, to which files are resized. Pixels must have it.
    """
    for first in range(0, len(pictures), size):
        part = pictures[first : first + size]
        if isinstance(part, Tensor):
            yield Batch([str(first + place) for place in range(len(part))], part, [])
            continue
        names, pixels, skipped = [], [np.empty((0, *shape), np.uint8)], []
        for number, picture in enumerate(part, start=first):
            name = _name_of(picture, number)
            try:
                pixels.append(read(picture, shape)[None])
                names.append(name)
            except ValueError as error:
                skipped.append(Skipped(name, str(error)))
        yield Batch(names, torch.from_numpy(np.concatenate(pixels)), skipped)


def _name_of(picture: Picture, number: int) -> str:
    """Return the name under which predictions list a picture, which is number ``number`` of all."""
    if isinstance(picture, Image.Image):
        return str(getattr(picture, "filename", "") or f"image {number}")
    return os.fspath(picture)


def content_digest(picture: Picture | Tensor) -> str:
    """Return a digest of a picture's content in 32 hexadecimal digits: of a file's bytes, or of pixels.

    A device's ledger knows images by it, so a copy under another name counts as the same image. A file that
    cannot be read gets the digest of its name: it will be skipped.
    """
    if isinstance(picture, Tensor):
        content = picture.contiguous().numpy().tobytes()
    elif isinstance(picture, Image.Image):
        content = picture.tobytes()
    else:
        content = os.fsencode(picture)
        with contextlib.suppress(OSError):
            content = Path(picture).read_bytes()
    return hashlib.sha256(content).hexdigest()[:32]


def read(picture: Picture, shape: Shape) -> np.ndarray:
    """Return a picture as uint8 of ``shape`` [C, H, W]; raise `ValueError` with the reason if it cannot be read.

    As in training, a colour image becomes grey for a model of grey images, and a grey one gets three channels for
    a model of colour images.
    """
    channels, height, width = shape
    try:
        if isinstance(picture, Image.Image):
            check_mode(picture)
            return pixels_of(picture, (width, height), channels)
        with open_image(Path(picture)) as image:
            return pixels_of(image, (width, height), channels)
    except Exception as error:  # a damaged file can raise nearly anything inside a decoder
        raise ValueError(reason(error)) from error
