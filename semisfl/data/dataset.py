"""A data set in memory: training images, labelled or not, and test images that training never sees."""

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from semisfl.data import builders, cached, places
from semisfl.data.decode import Decoded, Size, decode
from semisfl.settings.entries import NamedData


@dataclass(frozen=True)
class Dataset:
    """Training images, labelled or not, and test images that training never sees.

    Make one with `from_arrays`, `from_torch`, `from_hf` or `from_folder`, or directly from tensors.
    """

    name: str
    classes: tuple[str, ...]
    images: torch.Tensor  # uint8 [n, C, H, W]
    labels: torch.Tensor  # int64 [n]; -1 where unknown
    test_images: torch.Tensor  # uint8 [m, C, H, W]
    test_labels: torch.Tensor  # int64 [m]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    clients: dict[str, np.ndarray] | None = None  # where folders say who holds what
    served: int | None = None  # images before it are the server's alone, the others the clients'
    notes: tuple[str, ...] = ()

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
        for the clients. Without ``mean`` and ``std``, pixels are normalised by 0.5 and 0.5.
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
        listing = builders.hf_listing(dataset, image, label)
        return cls.from_decoded(name, decode(listing, _square(size), None))

    @classmethod
    def from_folder(cls, path: str | Path, *, size: int | None = None) -> "Dataset":
        """Return the images in a folder (``train/<class>/*``, ``test/<class>/*``, ...) or listed by a CSV file."""
        if not isinstance(path, str | Path):
            raise TypeError(f"path is a {type(path).__name__}; it must be a str or a Path")
        source = places.at(Path(os.path.expanduser(path)))
        if source is None:
            raise ValueError(f"{path} does not exist; give a folder of images or a CSV file")
        return cls.from_decoded(source.name, cached.decoded(source, _square(size), None))

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
        for field in ("mean", "std"):
            values = builders.channel_values(field, getattr(self, field))
            object.__setattr__(self, field, values)
        for field in ("images", "labels", "test_images", "test_labels"):
            if not isinstance(value := getattr(self, field), torch.Tensor):
                raise TypeError(
                    f"{field} is a {type(value).__name__}; it must be a torch.Tensor "
                    "(Dataset.from_arrays takes numpy arrays too)"
                )
        for field, pixels in (("images", self.images), ("test_images", self.test_images)):
            if pixels.dtype != torch.uint8 or pixels.ndim != 4:
                raise ValueError(
                    f"{field} is {pixels.dtype} {list(pixels.shape)}; "
                    "it must be torch.uint8 [n, channels, height, width]"
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
        self._check_labels("labels", self.labels, len(self.images), lowest=-1)
        self._check_labels("test_labels", self.test_labels, len(self.test_images), lowest=0)
        channels = self.images.shape[1]
        if channels not in (1, 3):
            raise ValueError(f"images have {channels} channels; 1 (grey) or 3 (colour) are known")
        finite = all(map(math.isfinite, (*self.mean, *self.std)))
        if not (finite and len(self.mean) == len(self.std) == channels and min(self.std) > 0):
            raise ValueError(
                f"mean {self.mean} and std {self.std} need a finite number for each of the {channels} "
                "channels, std above 0"
            )
        self._check_clients()

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return channels, height and width of an image."""
        _, channels, height, width = self.images.shape
        return channels, height, width

    def _check_labels(self, field: str, labels: torch.Tensor, count: int, lowest: int) -> None:
        if labels.dtype != torch.int64 or labels.shape != (count,):
            raise ValueError(
                f"{field} is {labels.dtype} {list(labels.shape)}; it must be torch.int64 [{count}]"
            )
        if count and not lowest <= int(labels.min()) <= int(labels.max()) < len(self.classes):
            raise ValueError(
                f"{field} runs from {int(labels.min())} to {int(labels.max())}; it must lie in "
                f"{lowest}..{len(self.classes) - 1} for the {len(self.classes)} classes"
            )
        if len(self.classes) == 1:
            raise ValueError(f"classes has one entry, {self.classes[0]!r}; at least 2 are needed")

    def _check_clients(self) -> None:
        if self.clients is None:
            return
        rows = np.concatenate([np.empty(0, np.int64), *self.clients.values()])
        if rows.size and not (rows.min() >= 0 and rows.max() < len(self.images)):
            raise ValueError(
                f"clients names images outside 0..{len(self.images) - 1}; leave them out"
            )
        if len(np.unique(rows)) < len(rows):
            raise ValueError("clients names an image twice; each may have one holder only")
        if empty := [name for name, held in self.clients.items() if not len(held)]:
            raise ValueError(f"clients {', '.join(empty)} hold no images; remove them")


def _square(size: int | None) -> Size | None:
    return None if size is None else (size, size)
