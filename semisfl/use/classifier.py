"""A trained model that answers: ``load("runs/first").predict(["photo.jpg"])``."""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from semisfl.data.augment import Normalizer
from semisfl.engine.inference import BATCH, outputs
from semisfl.models.layers import cut_layers
from semisfl.models.shapes import Shape
from semisfl.models.split import SplitModel, split
from semisfl.runs.portable import PARTS, Description
from semisfl.use import pictures
from semisfl.use.pictures import Picture, Skipped

Pictures = Sequence[Picture] | Picture | Tensor | np.ndarray
"""Files, folders, Pillow images, or uint8 pixels [n, C, H, W] at the model's own size."""

LARGEST_CHUNK = 2**27
"""Most values of the images that are read together."""
ListedPictures = Sequence[Picture] | Tensor
"""The same, one by one."""


@dataclass(frozen=True)
class Predictions:
    """A model's answers for the images that could be read."""

    names: list[str]
    probabilities: Tensor
    """[n, classes]"""
    classes: tuple[str, ...]
    skipped: list[Skipped]

    @property
    def labels(self) -> list[str]:
        """Return the most probable class of each image."""
        return [self.classes[place] for place in self.probabilities.argmax(1).tolist()]

    def top(self, count: int = 1) -> list[list[tuple[str, float]]]:
        """Return the ``count`` most probable classes of each image, with their probabilities."""
        values, places = self.probabilities.topk(min(count, len(self.classes)), dim=1)
        return [
            [(self.classes[place], value) for place, value in zip(*pair, strict=True)]
            for pair in zip(places.tolist(), values.tolist(), strict=True)
        ]


def listed_pictures(images: Pictures) -> ListedPictures:
    """Return every picture on its own; folders become the files in them, as in `pictures.files_of`."""
    if isinstance(images, np.ndarray):
        images = torch.from_numpy(np.ascontiguousarray(images))
    if isinstance(images, Tensor):
        return images
    single: list[Picture] = []
    if isinstance(images, str | os.PathLike | Image.Image) or not isinstance(images, Iterable):
        images = [images]
    for picture in images:
        if isinstance(picture, Image.Image):
            single.append(picture)
        elif isinstance(picture, str | os.PathLike):
            single += pictures.files_of([picture])
        else:
            raise TypeError(
                f"a picture is a {type(picture).__name__}; give files, folders or Pillow images, or all pixels as "
                "one uint8 array [n, C, H, W]"
            )
    return single


def predictions(
    images: ListedPictures,
    shape: Shape,
    classes: tuple[str, ...],
    answer: Callable[[Tensor], Tensor],
    at_a_time: int,
) -> Predictions:
    """Return ``answer`` (uint8 images -> probabilities) of ``images``, computed in batches."""
    if isinstance(images, Tensor):
        names = [str(number) for number in range(len(images))]
        parts = [answer(part) for part in images.split(at_a_time)] if len(images) else []
        parts.append(torch.empty(0, len(classes), device="cpu"))
        return Predictions(names, torch.cat(parts), classes, [])
    names, parts, skipped = [], [torch.empty(0, len(classes), device="cpu")], []
    for batch in pictures.batches(images, shape, at_a_time):
        names += batch.names
        skipped += batch.skipped
        parts.append(answer(batch.images))
    return Predictions(names, torch.cat(parts), classes, skipped)


class Classifier:
    """Both halves of a trained model, in eval mode, with its description."""

    def __init__(
        self,
        description: Description,
        network: SplitModel,
        digest: str,
        path: Path | None = None,
        parts: Sequence[str] = PARTS,
    ) -> None:
        self.description = description
        self.network = network.eval().requires_grad_(False)
        self.digest = digest
        """The digest of classes and weights: the same in every file of the same model."""
        self.path = path
        self.parts = tuple(parts)
        """The parts whose weights the file holds."""
        self.rounds: int | None = None
        """Rounds that its run had done; None: its file does not say."""
        self.normalizer = Normalizer.of(description.mean, description.std)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.description.classes

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return channels, height and width of an image."""
        return self.description.shape

    @property
    def device(self) -> torch.device:
        return self.normalizer.scale.device

    @property
    def identity(self) -> str:
        """Return the identity that a bottom and a top share if they are halves of one model."""
        return f"{self.digest}/{len(cut_layers(self.network)[0])}"

    def to(self, device: str | torch.device) -> "Classifier":
        for part in self.parts:  # the other one has no weights
            getattr(self.network, part).to(device)
        self.normalizer = self.normalizer.to(device)
        return self

    def predict(self, images: Pictures) -> Predictions:
        """Classify files, folders, Pillow images, or uint8 pixels [n, C, H, W] at the model's own size.

        Files that cannot be read are in ``skipped`` of the result, with the reason.
        """
        rows = max(1, min(pictures.CHUNK, LARGEST_CHUNK // prod(self.shape)))
        listed = listed_pictures(images)
        return predictions(listed, self.shape, self.classes, self.probabilities, rows)

    def probabilities(self, images: Tensor) -> Tensor:
        """Return the probabilities [n, classes] of uint8 images, on the CPU."""
        self.need(*PARTS)
        return self._run(self.network, images, len(self.classes)).softmax(1)

    def features(self, images: Tensor) -> Tensor:
        """Return the bottom's features of uint8 images: [n, d], on the CPU."""
        self.need("bottom")
        return self._run(self.network.bottom, images, self.network.features)

    def answer(self, features: Tensor) -> Tensor:
        """Return the class probabilities that the top computes from the bottom's features."""
        self.need("top")
        with torch.no_grad():
            parts = features.to(self.device).split(BATCH)
            return torch.cat([self.network.top(part).softmax(1).cpu() for part in parts])

    def need(self, *parts: str) -> None:
        if missing := [part for part in parts if part not in self.parts]:
            raise ValueError(
                f"{self.path} holds the {self.parts[0]} alone and this needs the {missing[0]}; "
                "give the run, or a file of the whole model"
            )

    def _run(self, network: nn.Module, images: Tensor, width: int) -> Tensor:
        if images.dtype != torch.uint8 or tuple(images.shape[1:]) != self.shape:
            channels, height, width = self.shape
            raise ValueError(
                f"images are {images.dtype} {list(images.shape)}; the model takes torch.uint8 "
                f"[n, {channels}, {height}, {width}]"
            )
        if not len(images):
            return torch.empty(0, width, device="cpu")
        answers = outputs(
            network,
            images,
            lambda part: self.normalizer(part.to(self.device)),
        )
        return torch.cat([answer.cpu() for answer in answers])

    def recut(self, cut: int | str) -> "Classifier":
        """Return the same model cut at another layer."""
        self.need(*PARTS)
        bottom, top = cut_layers(self.network)
        layers = nn.Sequential(OrderedDict([*bottom, *top]))
        again = split(layers, self.shape, cut, "none")
        described = replace(self.description, cut=cut)
        return Classifier(described, again, self.digest, self.path).to(self.device)
