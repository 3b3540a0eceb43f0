"""Compute accuracy, recall and F1 from counts of true and predicted classes."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """Counts of a model's answers for some images, and the scores that follow from them."""

    confusion: np.ndarray
    """[true class, predicted class]: numbers of images."""
    images: int
    """All images; those whose label is unknown count as wrong."""

    @classmethod
    def of(cls, predicted: Tensor, labels: Tensor, classes: int) -> "Scores":
        """Count the predictions of images; a label of -1 is unknown."""
        pairs = (labels * classes + predicted)[labels >= 0]
        counts = torch.bincount(pairs, minlength=classes**2).view(classes, classes)
        return cls(counts.cpu().numpy(), len(labels))

    @property
    def accuracy(self) -> float:
        """Return the accuracy in percent."""
        return 100 * float(np.trace(self.confusion)) / self.images

    @property
    def recall(self) -> list[float | None]:
        """Return each class's recall in percent; None where it has no image."""
        return shares(self.confusion.diagonal(), self.confusion.sum(1))

    @property
    def precision(self) -> list[float | None]:
        """Return each class's precision in percent; None where no image was assigned to it."""
        return shares(self.confusion.diagonal(), self.confusion.sum(0))

    @property
    def macro_f1(self) -> float:
        """Return the mean F1 of the classes that have images, in percent: F1 = 2 TP / (2 TP + FP + FN)."""
        true, predicted = self.confusion.sum(1), self.confusion.sum(0)
        present = true > 0
        f1 = 2 * self.confusion.diagonal()[present] / (true + predicted)[present]
        return 100 * float(f1.mean()) if f1.size else 0.0


def shares(parts: np.ndarray, wholes: np.ndarray) -> list[float | None]:
    """Return the parts in percent of their wholes; None where the whole is 0."""
    pairs = zip(parts.tolist(), wholes.tolist(), strict=True)
    return [100 * part / total if total else None for part, total in pairs]
