"""Evaluate a model on labelled images: accuracy, precision, recall, confusion matrix and calibration, with a picture.

A model is well calibrated if of all images that it classifies with a confidence of 80 % it has 80 % right.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from semisfl.data import hub, sources, table
from semisfl.data.folder import class_name, folders_in
from semisfl.data.holdings import shorten
from semisfl.runs.scores import Scores
from semisfl.settings.counts import plural
from semisfl.use.classifier import Classifier
from semisfl.use.pictures import Skipped, batches, files_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BINS = 15
"""Intervals of confidence, for the calibration error."""
LONGEST_NAME = 20
"""Characters of a class's name in the picture."""
MOST_NUMBERED = 30
"""Classes up to which a cell of the picture has room for its number."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Bin:
    """The images whose confidence, their highest class probability, lies in one interval."""

    count: int
    confidence: float
    """Mean confidence, from 0 to 1."""
    accuracy: float
    """Share of the images that are classified correctly, from 0 to 1."""


@dataclass(frozen=True)
class Evaluation(Scores):
    """A model's scores on labelled images, with its calibration."""

    classes: tuple[str, ...]
    bins: tuple[Bin, ...]
    """The intervals with any images, by confidence."""
    skipped: tuple[Skipped, ...] = ()
    """Images that could not be read, and have no part in the scores."""

    @property
    def calibration_error(self) -> float:
        """Return the expected calibration error in percent.

        It is the gap between confidence and accuracy in each interval, averaged over the images.
        """
        gaps = (bin.count * abs(bin.confidence - bin.accuracy) for bin in self.bins)
        return 100 * sum(gaps) / self.images

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers as plain values, for JSON."""
        counts = self.confusion.sum(1).tolist()
        by_class = zip(self.classes, self.precision, self.recall, counts, strict=True)
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
    """Compare class probabilities with the true labels.

    Args:
        classes: names of the classes.
        probabilities: float [n, classes].
        labels: int64 [n], the index of each image's class.
        skipped: images that could not be read, to be listed in the result.
    """
    confidence, predicted = probabilities.max(1)
    scores = Scores.of(predicted, labels, len(classes))
    # Intervals include their upper end, so that probability 1 belongs to one.
    places = (confidence * BINS).ceil().long().clamp(1, BINS)
    right = (predicted == labels).float()
    bins = []
    for place in range(1, BINS + 1):
        inside = places == place
        if count := int(inside.sum()):
            bins.append(Bin(count, float(confidence[inside].mean()), float(right[inside].mean())))
    return Evaluation(scores.confusion, scores.images, classes, tuple(bins), tuple(skipped))


def evaluate_on(model: Classifier, data: str | Path) -> Evaluation:
    """Evaluate a model on the images that ``data`` names.

    ``data``: a folder with one folder per class; a folder with such a folder ``test``; a CSV file with the
    columns path and label, whose lines with ``split = test`` are used if it has any; or the name of a data set,
    whose test images are used. Raises `ValueError` for a class that the model does not know, and if no image
    can be read.
    """
    place = Path(data)
    if place.suffix.lower() == ".csv" and place.is_file():
        classes = table.test_images(place)
    elif place.is_dir() and not hub.is_copy(place):
        place = place / "test" if (place / "test").is_dir() else place
        classes = [(folder.name, folder) for folder in folders_in(place)]
        if not classes:
            raise ValueError(f"{place} has no class folders; put the images of each class in one")
    else:
        return _evaluate_on_set(model, str(data))
    by_label: dict[int, list[Path]] = {}
    known = _labels_of(model, [name for name, _ in classes], str(place))
    for label, (_, images) in zip(known, classes, strict=True):
        by_label.setdefault(label, []).extend(files_of(images))
    probabilities, labels, skipped = [], [], []
    for label, files in sorted(by_label.items()):
        for batch in batches(files, model.shape):
            probabilities.append(model.probabilities(batch.images))
            labels += [label] * len(batch.images)
            skipped += batch.skipped
    if not labels:
        raise ValueError(
            f"none of {plural(len(skipped), 'image')} in {place} can be read: {skipped[0].image}: "
            f"{skipped[0].reason}"
        )
    true = torch.tensor(labels, device="cpu")
    return judge(model.classes, torch.cat(probabilities), true, skipped)


def _labels_of(model: Classifier, names: Sequence[str], where: str) -> list[int]:
    """Return the model's label of each class name; raise `ValueError` for a name that it does not know."""
    known = {class_name(name): label for label, name in enumerate(model.classes)}
    labels = [known.get(class_name(name)) for name in names]
    if None in labels:
        raise ValueError(
            f"{where} has the class {names[labels.index(None)]!r}, which is no class of the model: "
            f"{', '.join(model.classes[:20])}; rename or remove it"
        )
    return [label for label in labels if label is not None]


def _evaluate_on_set(model: Classifier, name: str) -> Evaluation:
    """Evaluate on the test images of a named data set."""
    _, height, width = model.shape
    data = sources.load(name, size=height if height == width else None)
    theirs = torch.tensor(_labels_of(model, data.classes, data.name), device="cpu")
    for note in data.notes:
        log.warning("%s", note)
    return judge(model.classes, model.probabilities(data.test_images), theirs[data.test_labels])


# --- the picture ---------------------------------------------------------------------------------


def picture(evaluation: Evaluation) -> "Figure":
    """Draw the confusion matrix on the left, and accuracy over confidence on the right."""
    from matplotlib.figure import Figure  # slow to import, and only used here
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    side = float(np.clip(1.8 + 0.42 * len(evaluation.classes), 4, 14))
    layout = ConstrainedLayoutEngine(h_pad=0.1)  # square axes come out a little higher than planned
    figure = Figure(figsize=(side + 4.8, max(side, 4.4)), layout=layout)
    confusion, calibration = figure.subplots(1, 2, width_ratios=[side, 4])
    _draw_confusion(confusion, evaluation)
    _draw_calibration(calibration, evaluation)
    return figure


def _draw_confusion(axes: "Axes", evaluation: Evaluation) -> None:
    """Draw a cell per pair of true and predicted class; a dark cell has many of its true class."""
    counts = evaluation.confusion
    names = [shorten(name, LONGEST_NAME) for name in evaluation.classes]
    # Coloured by line, so that a rare class is as readable as a common one.
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if len(names) <= MOST_NUMBERED:
        for true, given in np.argwhere(counts):
            colour = "white" if shares[true, given] > 0.5 else "black"
            style: dict[str, Any] = {"ha": "center", "va": "center", "color": colour, "fontsize": 8}
            axes.text(given, true, counts[true, given], **style)
    axes.set_xticks(range(len(names)), names, rotation=90)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="predicted class", ylabel="true class")
    axes.set_title(f"{evaluation.accuracy:.1f} % right of {plural(evaluation.images, 'image')}")


def _draw_calibration(axes: "Axes", evaluation: Evaluation) -> None:
    """Draw a dot per interval of confidence, as large as it has images; on the dotted line is calibrated."""
    bins = evaluation.bins
    most = max(bin.count for bin in bins)
    axes.plot([0, 100], [0, 100], color="grey", linewidth=1, linestyle=":")
    axes.scatter(
        [100 * bin.confidence for bin in bins],
        [100 * bin.accuracy for bin in bins],
        s=[15 + 150 * bin.count / most for bin in bins],
        alpha=0.8,
    )
    axes.set(xlim=(-3, 103), ylim=(-3, 103), xlabel="confidence (%)", ylabel="accuracy (%)")
    axes.set_box_aspect(1)
    axes.set_title(f"calibration error {evaluation.calibration_error:.1f} %")
    axes.grid(alpha=0.25)
