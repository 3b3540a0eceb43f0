"""A data set in memory: training images, labelled or not, and test images that training never sees."""

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from semisfl.data import builders, hub, places
from semisfl.data.decode import Decoded, Size, decode
from semisfl.settings.catalog import NamedData


@dataclass(frozen=True)
class Dataset:
    """Training images, labelled or not, and test images that training never sees.

    Make one with `from_arrays`, `from_torch`, `from_hf` or `from_folder`, or directly from tensors.
    """

    name: str
    classes: tuple[str, ...]
    images: torch.Tensor
    """uint8 [n, C, H, W], on the CPU."""
    labels: torch.Tensor
    """int64 [n]; -1: unknown."""
    test_images: torch.Tensor
    """uint8 [m, C, H, W]"""
    test_labels: torch.Tensor
    """int64 [m]"""
    mean: tuple[float, ...]
    """One number per channel, of pixels from 0 to 1; with ``std`` models' inputs are normalised by it."""
    std: tuple[float, ...]
    clients: dict[str, np.ndarray] | None = None
    """Indices into ``images`` by client, where folders or a CSV file say who holds what."""
    served: int | None = None
    """So many of the first images are the server's alone, the others the clients'; None: all may be either's."""
    notes: tuple[str, ...] = ()
    """Remarks for the user on how the images were read, one line each."""

    @classmethod
    def from_arrays(
        cls,
        images: Any,
        labels: Any,
        test_images: Any,
        test_labels: Any,
        *,
        unlabeled: Any = None,
        classes: Sequence[str] | None = None,
        name: str = "arrays",
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> "Dataset":
        """Return a data set of numpy arrays or torch tensors.

        Images are uint8, or floats from 0 to 1: [n, height, width], or with 1 or 3 channels first or
        last. Labels are whole numbers (-1: unknown) or class names. ``unlabeled`` are further images
        for the clients. Without ``mean`` and ``std``, pixels are normalised by 0.5 and 0.5. Raises
        ValueError for other shapes and ranges.
        """
        fields = builders.array_fields(images, labels, test_images, test_labels, unlabeled, classes)
        halves = (0.5,) * fields["images"].shape[1]
        fields["mean"] = halves if mean is None else mean
        fields["std"] = halves if std is None else std
        return cls(name=name, **fields)

    @classmethod
    def from_torch(
        cls,
        train: Any,
        test: Any,
        *,
        unlabeled: Any = None,
        classes: Sequence[str] | None = None,
        size: int | None = None,
        name: str = "torch",
    ) -> "Dataset":
        """Return a data set of two torch data sets, whose items are (image, label).

        An image is a Pillow image, an array or a tensor, without random augmentation. ``unlabeled`` is
        a third set, whose labels are not read. Pillow images are resized to ``size``, or to the most
        common size.
        """
        listing = builders.torch_listing(train, test, unlabeled, classes)
        return cls.from_decoded(name, decode(listing, _square(size), None))

    @classmethod
    def from_hf(
        cls,
        dataset: Any,
        *,
        image: str | None = None,
        label: str | None = None,
        size: int | None = None,
        name: str = "hf",
    ) -> "Dataset":
        """Return a data set of a Hugging Face ``DatasetDict`` with the splits train and test.

        ``image`` and ``label`` name its columns, where they are not called so. A split called
        ``unlabeled`` gives further images for the clients.
        """
        listing = hub.listing(dataset, image, label)
        return cls.from_decoded(name, decode(listing, _square(size), None))

    @classmethod
    def from_folder(cls, path: str | Path, *, size: int | None = None) -> "Dataset":
        """Return the images in a folder (see `semisfl.data.folder`) or listed by a CSV file (`semisfl.data.table`).

        Images are resized to ``size`` pixels on each side, or to the most common size.
        """
        source = places.source_at(Path(os.path.expanduser(path)))
        if source is None:
            raise ValueError(f"{path} does not exist; give a folder of images or a CSV file")
        return cls.from_decoded(source.name, places.decode_once(source, _square(size), None))

    @classmethod
    def from_decoded(
        cls, name: str, decoded: Decoded, like: "NamedData | Dataset | None" = None
    ) -> "Dataset":
        """Return decoded images as a data set, normalised as ``like`` is, else by 0.5 and 0.5."""
        halves = (0.5,) * decoded.images.shape[1]
        holder = decoded.holder[: decoded.trains]
        holders = {
            client: np.flatnonzero(holder == number)
            for number, client in enumerate(decoded.holders)
        }
        return cls(
            name=name,
            classes=decoded.classes,
            images=torch.from_numpy(decoded.images[: decoded.trains]),
            labels=torch.from_numpy(decoded.labels[: decoded.trains]),
            test_images=torch.from_numpy(decoded.images[decoded.trains :]),
            test_labels=torch.from_numpy(decoded.labels[decoded.trains :]),
            mean=like.mean if like else halves,
            std=like.std if like else halves,
            clients=holders or None,
            notes=decoded.notes,
        )

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", builders.class_names(self.classes))
        for name in ("mean", "std"):
            object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))
        for name, pixels in (("images", self.images), ("test_images", self.test_images)):
            if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[1] not in (1, 3):
                raise ValueError(
                    f"{name} is {pixels.dtype} {list(pixels.shape)}; it must be torch.uint8 "
                    "[n, 1 or 3 channels, height, width]"
                )
        if not len(self.images):
            raise ValueError("images holds no image; at least one is needed to train on")
        if self.images.shape[1:] != self.test_images.shape[1:]:
            raise ValueError(
                f"images are {list(self.images.shape[1:])} but test_images are "
                f"{list(self.test_images.shape[1:])}; resize one of them"
            )
        if double := [name for name, count in Counter(self.classes).items() if count > 1]:
            raise ValueError(f"classes has {double[0]!r} twice; give every class a name of its own")
        if len(self.classes) == 1:
            raise ValueError(f"classes has one entry, {self.classes[0]!r}; at least 2 are needed")
        self._check_labels("labels", self.labels, len(self.images), lowest=-1)
        self._check_labels("test_labels", self.test_labels, len(self.test_images), lowest=0)
        channels = self.images.shape[1]
        finite = all(map(math.isfinite, (*self.mean, *self.std)))
        if not (finite and len(self.mean) == len(self.std) == channels and min(self.std) > 0):
            raise ValueError(
                f"mean {self.mean} and std {self.std} need a finite number for each of the {channels} "
                "channels, std above 0"
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return channels, height and width of an image."""
        _, channels, height, width = self.images.shape
        return channels, height, width

    def for_network(self, mean: Sequence[float], std: Sequence[float]) -> "Dataset":
        """Return the same images for a network that needs them normalised by ``mean`` and ``std``.

        Grey images are repeated to as many channels. Raises ValueError for colour images and a network of grey ones.
        """
        channels = self.shape[0]
        if channels not in (1, len(mean)):
            raise ValueError(
                f"{self.name} has images of {channels} channels, and the weights need {len(mean)}; use grey images "
                "or other weights (model.weights)"
            )
        copies = (1, len(mean) // channels, 1, 1)
        images, tests = self.images.repeat(copies), self.test_images.repeat(copies)
        return replace(self, images=images, test_images=tests, mean=tuple(mean), std=tuple(std))

    def _check_labels(self, name: str, labels: torch.Tensor, count: int, lowest: int) -> None:
        if labels.dtype != torch.int64 or labels.shape != (count,):
            raise ValueError(
                f"{name} is {labels.dtype} {list(labels.shape)}; it must be torch.int64 [{count}]"
            )
        if count and not lowest <= int(labels.min()) <= int(labels.max()) < len(self.classes):
            raise ValueError(
                f"{name} runs from {int(labels.min())} to {int(labels.max())}; it must lie in "
                f"{lowest}..{len(self.classes) - 1} for the {len(self.classes)} classes"
            )


def _square(size: int | None) -> Size | None:
    """Return height and width of a square of this side; None for none."""
    return None if size is None else (size, size)
