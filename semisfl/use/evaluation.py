"""Evaluate a model on labelled images: accuracy, precision, recall, confusion matrix, calibration."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from semisfl.data import hub, sources, table
from semisfl.data.folder import class_name, folders_in
from semisfl.runs.scores import Scores
from semisfl.settings.counts import counted
from semisfl.use import pictures
from semisfl.use.classifier import Classifier
from semisfl.use.pictures import Skipped

BINS = 15

log = logging.getLogger(__name__)


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
    """Evaluate on ``data``: a folder of class folders, one with such a folder ``test``, a CSV file, or a named set."""
    place, classes = Path(data), tuple(map(class_name, model.classes))
    if place.suffix.lower() == ".csv" and place.is_file():
        by_class = _listed(place, classes)
    elif place.is_dir() and not hub.is_copy(place):
        folder = place / "test" if (place / "test").is_dir() else place
        by_class = _class_folders(folder, classes)
    else:
        return _on_test_set(model, str(data))
    probabilities, labels, skipped = [], [], []
    for label, files in by_class:
        for batch in pictures.batches(files, model.shape):
            probabilities.append(model.probabilities(batch.images))
            labels += [label] * len(batch.images)
            skipped += batch.skipped
    if not labels:
        raise ValueError(
            f"none of {counted(len(skipped), 'image')} in {place} can be read: {skipped[0].image}: "
            f"{skipped[0].reason}"
        )
    return judge(
        model.classes, torch.cat(probabilities), torch.tensor(labels, device="cpu"), skipped
    )


def _listed(file: Path, classes: tuple[str, ...]) -> list[tuple[int, list[Path]]]:
    """Return the images that a CSV file lists, by class."""
    by_class: dict[str, list[Path]] = {}
    for name, image in table.tested(file):
        by_class.setdefault(name, []).append(image)
    for name in by_class:
        _check_known(f"{file}: {name!r}", name, classes)
    return [(classes.index(name), by_class[name]) for name in sorted(by_class)]


def _class_folders(place: Path, classes: tuple[str, ...]) -> list[tuple[int, list[Path]]]:
    folders = folders_in(place)
    if not folders:
        raise ValueError(f"{place} has no class folders; put the images of each class in one")
    named = [(class_name(folder.name), folder) for folder in folders]
    for name, folder in named:
        _check_known(str(folder), name, classes)
    return [(classes.index(name), pictures.files_of([folder])) for name, folder in named]


def _check_known(where: str, name: str, classes: tuple[str, ...]) -> None:
    if name not in classes:
        known = ", ".join(classes[:20]) + (", ..." if len(classes) > 20 else "")
        raise ValueError(
            f"{where} is no class of the model, which knows {known}; rename or remove it"
        )


def _on_test_set(model: Classifier, name: str) -> Evaluation:
    channels, height, width = model.shape
    data = sources.load(name, size=height if height == width else None)
    known = list(map(class_name, model.classes))
    if unknown := sorted(set(data.classes) - set(known)):
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
        raise ValueError(f"data set {data.name!r} has no test images; name data that has some")
    for note in data.notes:
        log.warning("%s", note)
    theirs = torch.tensor([known.index(name) for name in data.classes], device="cpu")
    return judge(model.classes, model.probabilities(data.test_images), theirs[data.test_labels])
