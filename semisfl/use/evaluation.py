"""Evaluate a model on labelled images: accuracy, precision, recall, confusion matrix, calibration."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from semisfl.data import hub, sources
from semisfl.runs.scores import Scores
from semisfl.use import pictures
from semisfl.use.classifier import Classifier
from semisfl.use.pictures import Skipped

BINS = 15


@dataclass(frozen=True)
class Bin:
    """Images whose highest probability lies in one interval: mean confidence and accuracy."""

    count: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Evaluation(Scores):
    """A model's scores on labelled images, with its calibration."""

    classes: tuple[str, ...]
    bins: tuple[Bin, ...]
    """Those with any images, by confidence."""
    skipped: tuple[Skipped, ...] = ()

    @property
    def calibration_error(self) -> float:
        """Return the expected calibration error in percent: the mean gap of confidence and accuracy."""
        gaps = (bin.count * abs(bin.confidence - bin.accuracy) for bin in self.bins)
        return 100 * sum(gaps) / self.images

    def as_dict(self) -> dict[str, Any]:
        by_class = zip(
            self.classes, self.precision, self.recall, self.confusion.sum(1).tolist(), strict=True
        )
        return {
            "images": self.images,
            "accuracy": self.accuracy,
            "macro_f1": self.macro_f1,
            "calibration_error": self.calibration_error,
            "classes": [
                {"name": name, "images": count, "precision": precision, "recall": recall}
                for name, precision, recall, count in by_class
            ],
            "confusion": self.confusion.tolist(),
            "bins": [vars(bin) for bin in self.bins],
            "skipped": [skipped._asdict() for skipped in self.skipped],
        }


def judge(
    classes: tuple[str, ...],
    probabilities: Tensor,
    labels: Tensor,
    skipped: Iterable[Skipped] = (),
) -> Evaluation:
    """Compare [n, classes] probabilities with the true labels."""
    confidence, predicted = probabilities.max(1)
    scores = Scores.of(predicted, labels, len(classes))
    # Intervals include their upper end, so that probability 1 belongs to one.
    places = (confidence * BINS).ceil().long().clamp(1, BINS)
    right = (predicted == labels).float()
    bins = []
    for place in range(1, BINS + 1):
        inside = places == place
        if count := int(inside.sum()):
            means = float(confidence[inside].mean()), float(right[inside].mean())
            bins.append(Bin(count, *means))
    return Evaluation(scores.confusion, scores.images, classes, tuple(bins), tuple(skipped))


def evaluate_on(model: Classifier, data: str | Path) -> Evaluation:
    """Evaluate on ``data``: a folder of class folders, one with such a folder ``test``, or a data set's test images."""
    place = Path(data)
    if not place.is_dir() or hub.is_copy(place):
        return _on_test_set(model, str(data))
    by_class = _class_folders(place / "test" if (place / "test").is_dir() else place, model.classes)
    probabilities, labels, skipped = [], [], []
    for label, folder in by_class:
        for batch in pictures.batches(pictures.files_of([folder]), model.shape):
            probabilities.append(model.probabilities(batch.images))
            labels += [label] * len(batch.images)
            skipped += batch.skipped
    if not labels:
        raise ValueError(
            f"none of the {len(skipped)} images in {place} can be read: {skipped[0].image}: "
            f"{skipped[0].reason}"
        )
    return judge(model.classes, torch.cat(probabilities), torch.tensor(labels), skipped)


def _class_folders(place: Path, classes: tuple[str, ...]) -> list[tuple[int, Path]]:
    folders = sorted(
        folder for folder in place.iterdir() if folder.is_dir() and not folder.name.startswith(".")
    )
    if not folders:
        raise ValueError(f"{place} has no class folders; put the images of each class in one")
    for folder in folders:
        if folder.name not in classes:
            known = ", ".join(classes[:20]) + (", ..." if len(classes) > 20 else "")
            raise ValueError(
                f"{folder} is no class of the model, which knows {known}; rename or remove it"
            )
    return [(classes.index(folder.name), folder) for folder in folders]


def _on_test_set(model: Classifier, name: str) -> Evaluation:
    channels, height, width = model.shape
    data = sources.load(name, size=height if height == width else None)
    if unknown := sorted(set(data.classes) - set(model.classes)):
        raise ValueError(
            f"{data.name} has the class {unknown[0]!r}, which is none of the model's: "
            f"{', '.join(model.classes[:20])}; use data with these classes"
        )
    if data.shape != model.shape:
        raise ValueError(
            f"{data.name} has images of {'x'.join(map(str, data.shape))}; the model takes "
            f"{channels}x{height}x{width}"
        )
    if not len(data.test_labels):
        raise ValueError(f"data set {data.name!r} has no test images")
    theirs = torch.tensor([model.classes.index(label_name) for label_name in data.classes])
    return judge(model.classes, model.probabilities(data.test_images), theirs[data.test_labels])
