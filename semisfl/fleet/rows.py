"""The rows of a frozen bottom: how a client encodes its images, and the file in which its rows are kept.

A simulated client and a device that trains call `Encoder.rows`; a device that classifies calls `Encoder.plain`, the
same encoding without views. The same image, client's name and settings give the same rows, alone or among others: the
views follow from them, and the bottom always computes batches of one size. A file holds rows as the wire's codecs encode them. It is mapped into memory and not
read, so all rows together may be larger than memory.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from semisfl import seeds
from semisfl.data.augment import Augmentation
from semisfl.data.fixed_views import DIGEST_BYTES, KINDS, views_of
from semisfl.files import write_whole
from semisfl.fleet.codec import codec_named
from semisfl.fleet.outgoing import Cleared, Outgoing
from semisfl.settings.config import Config

TOGETHER = 128
"""How many images to encode at a time, and the views in a pass of the bottom on a GPU."""
TOGETHER_CPU = 16
"""Views in a pass on a CPU: those of 128 views leave its caches, and take two to four times as long per view."""


@dataclass(frozen=True)
class Encoder:
    """A frozen bottom with all else that decides its rows."""

    bottom: Callable[[Tensor], Tensor]
    """Maps normalised images [n, C, H, W] to features [n, d]; a module is in eval mode."""
    normalizer: Callable[[Tensor], Tensor]
    outgoing: Outgoing
    """Applies the client's policy to the rows."""
    config: Config | None = None
    """The run's: its seed, augmentation and numbers of views are used. None: the device only classifies."""

    @torch.no_grad()
    def rows(self, images: Tensor, client: str, digests: Sequence[str]) -> Cleared:
        """Return the rows of uint8 ``images`` [n, C, H, W] as the policy lets them leave.

        They are ``weak`` [n * weak views, d] and ``strong``, image by image. ``client``: the name in the client's
        certificate, in a simulation its index. ``digests``: the `content_digest` of each image.
        """
        assert self.config is not None, "a device that only classifies draws no views"
        seed, counts = self.config.seed, self.config.clients.views
        views = views_of(
            images, digests, client, counts, Augmentation.of(self.config.data.augment), seed
        ).flatten(0, 1)
        together = TOGETHER_CPU if views.device.type == "cpu" else TOGETHER
        whole = nn.functional.pad(views, (0, 0, 0, 0, 0, 0, 0, -len(views) % together))
        rows = self._features(whole, together)[: len(views)].unflatten(0, (len(images), -1))
        return self.outgoing.views(
            rows, counts["weak"], [seeds.derive(seed, "noise", client, one) for one in digests]
        )

    @torch.no_grad()
    def plain(self, images: Tensor) -> Cleared:
        """Return the rows ``features`` [n, d] of uint8 images that a server is to classify, as the policy lets them leave.

        An image is its own only view. The last pass is not filled up, so that a single image is fast: its row may
        differ in the last bits from its row among others.
        """
        return self.outgoing.answerable(self._features(images, TOGETHER_CPU))

    def _features(self, images: Tensor, together: int) -> Tensor:
        """Return the bottom's features of uint8 images, in passes of so many ``together``."""
        return torch.cat([self.bottom(self.normalizer(some)) for some in images.split(together)])


@dataclass(frozen=True)
class RowFormat:
    """How an image's rows become bytes: its weak rows, then its strong ones, each as its codec encodes it alone."""

    codecs: Mapping[str, str]
    """The codec of the rows of each kind of view, ``weak`` and ``strong``."""
    views: Mapping[str, int]
    """How many views of each kind an image has."""
    features: int
    """The length of a row, d."""

    @classmethod
    def of(cls, config: Config, features: int) -> "RowFormat":
        """Return the format of the rows in a run: the teacher sees weak views, the student strong ones."""
        wire = config.wire
        codecs = {"weak": wire.teacher_features, "strong": wire.student_features}
        return cls(codecs, config.clients.views, features)

    @property
    def size(self) -> int:
        """Return the bytes of all rows of an image."""
        return sum(self.part(kind) for kind in KINDS)

    def part(self, kind: str) -> int:
        """Return the bytes of an image's rows of one kind of view."""
        return self.views[kind] * codec_named(self.codecs[kind]).size((1, self.features))

    def pack(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Return the bytes of some images, [images, bytes], from their rows of each kind, [images * views, d]."""
        encoded = [codec_named(self.codecs[kind]).encode(rows[kind]) for kind in KINDS]
        flat = [[part.reshape(len(part), -1).view(torch.uint8) for part in one] for one in encoded]
        return torch.cat(
            [
                torch.cat(parts, 1).view(len(rows["weak"]) // self.views["weak"], -1)
                for parts in flat
            ],
            1,
        )

    def unpack_images(self, packed: Tensor) -> dict[str, Tensor]:
        """Return the rows of each kind, [images * views, d], from what `pack` returned."""
        parts = packed.split([self.part(kind) for kind in KINDS], 1)
        return {
            kind: self.unpack(kind, part.reshape(len(packed) * self.views[kind], -1))
            for kind, part in zip(KINDS, parts, strict=True)
        }

    def unpack(self, kind: str, packed: Tensor) -> Tensor:
        """Return rows [n, d] from their bytes [n, bytes of a row]."""
        codec, shape = codec_named(self.codecs[kind]), (len(packed), self.features)
        layout = codec.layout(shape)
        parts = packed.split([prod(part[1:]) * dtype.itemsize for part, dtype in layout], 1)
        typed = [
            part.contiguous().view(dtype).reshape(size)
            for part, (size, dtype) in zip(parts, layout, strict=True)
        ]
        return codec.decode(typed, shape)


class RowFile:
    """The rows of one client in a file: a line of JSON that says what they are, then each image's digest and rows."""

    def __init__(self, path: Path) -> None:
        """Map the file at ``path`` with the images that it has now; others may be appended later.

        Raises `ValueError` for a file that does not begin as one of rows does.
        """
        begin, self.path = header(path), path
        try:
            self.about: dict[str, Any] = json.loads(begin)
            """What the rows are, and whose."""
            self.client = str(self.about["client"])
            """The client's name."""
            self._form = RowFormat(*(self.about[key] for key in ("codecs", "views", "features")))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged, or no file of rows; copy it again") from error
        record = DIGEST_BYTES + self._form.size
        self.images = (path.stat().st_size - len(begin)) // record
        """How many images it has rows of."""
        self.bytes = self.images * self._form.size
        """The encoded size of all rows."""
        self.end = len(begin) + self.images * record
        """Where they end, in bytes; a killed process may have left half an image behind them."""
        mapped = np.memmap(path, np.uint8, "r", len(begin), (self.images, record))
        self._digests, self._rows = np.split(mapped, [DIGEST_BYTES], 1)

    @property
    def digests(self) -> bytes:
        """Return the `content_digest` of all images, in their order, one after another."""
        return self._digests.tobytes()

    @classmethod
    def find(cls, path: Path, begin: bytes, digests: Sequence[str]) -> "RowFile | None":
        """Return the file at ``path`` if it has this `first_line` and the rows of these images; else None."""
        if path.exists() and header(path) == begin:
            file = cls(path)
            return file if file.digests.hex() == "".join(digests) else None
        return None

    @classmethod
    def write(
        cls, path: Path, begin: bytes, digests: Sequence[str], packed: Iterable[Tensor]
    ) -> "RowFile":
        """Write a file, whole or not at all, and return it; ``packed`` yields the bytes of some images at a time."""
        named = BytesIO(bytes.fromhex("".join(digests)))
        parts = (records(named.read(DIGEST_BYTES * len(some)), some) for some in packed)
        path.parent.mkdir(exist_ok=True)
        write_whole(path, lambda file: file.writelines(chain([begin], parts)), private=True)
        return cls(path)

    def draw(self, kind: str, images: np.ndarray, views: np.ndarray) -> Tensor:
        """Return the bytes [..., bytes of a row] of one row for each of ``images`` [...], of its view in ``views`` [...]."""
        count, size = self._form.views[kind], self._form.part(kind)
        part = self._rows[:, :size] if kind == "weak" else self._rows[:, -size:]
        return torch.from_numpy(part.reshape(self.images, count, -1)[images, views])


def first_line(form: RowFormat, about: Mapping[str, Any]) -> bytes:
    """Return how a file begins: ``about`` and ``form`` say what the rows are, and whose."""
    return json.dumps({**about, **vars(form)}, sort_keys=True).encode() + b"\n"


def header(path: Path) -> bytes:
    """Return the first line of a file."""
    with path.open("rb") as file:
        return file.readline()


def records(digests: bytes, packed: Tensor) -> bytes:
    """Return what a file holds of some images: the digest of each, then its ``packed`` rows [images, bytes]."""
    names = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES)
    return np.hstack([names, packed.cpu().numpy()]).tobytes()
