"""Draw an evaluation: the confusion matrix, and confidence against accuracy."""

from typing import TYPE_CHECKING

import numpy as np

from semisfl.data.holdings import short
from semisfl.settings.counts import counted
from semisfl.use.evaluation import Evaluation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LONGEST_NAME = 20
MOST_NUMBERED = 30
"""Classes up to which a cell has room for its number."""


def picture(evaluation: Evaluation) -> "Figure":
    from matplotlib.figure import Figure  # slow to import, and only used here
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    side = float(np.clip(1.8 + 0.42 * len(evaluation.classes), 4, 14))
    layout = ConstrainedLayoutEngine(h_pad=0.1)  # square axes come out a little higher than planned
    figure = Figure(figsize=(side + 4.8, max(side, 4.4)), layout=layout)
    confusion, calibration = figure.subplots(1, 2, width_ratios=[side, 4])
    _confusion(confusion, evaluation)
    _calibration(calibration, evaluation)
    return figure


def _confusion(axes: "Axes", evaluation: Evaluation) -> None:
    counts = evaluation.confusion
    names = [short(name, LONGEST_NAME) for name in evaluation.classes]
    # Coloured by row, so that a rare class is as readable as a common one.
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if len(names) <= MOST_NUMBERED:
        for row, column in np.argwhere(counts):
            colour = "white" if shares[row, column] > 0.5 else "black"
            axes.text(
                column, row, counts[row, column], ha="center", va="center", color=colour, fontsize=8
            )
    axes.set_xticks(range(len(names)), names, rotation=90)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("class given")
    axes.set_ylabel("true class")
    axes.set_title(f"{evaluation.accuracy:.1f} % right of {counted(evaluation.images, 'image')}")


def _calibration(axes: "Axes", evaluation: Evaluation) -> None:
    bins = evaluation.bins
    most = max(bin.count for bin in bins)
    axes.plot([0, 100], [0, 100], color="grey", linewidth=1, linestyle=":")
    axes.scatter(
        [100 * bin.confidence for bin in bins],
        [100 * bin.accuracy for bin in bins],
        s=[15 + 150 * bin.count / most for bin in bins],
        alpha=0.8,
    )
    axes.set_xlim(-3, 103)
    axes.set_ylim(-3, 103)
    axes.set_box_aspect(1)
    axes.set_xlabel("how sure the model is (%)")
    axes.set_ylabel("how often it is right (%)")
    axes.set_title(f"calibration error {evaluation.calibration_error:.1f} %")
    axes.grid(alpha=0.25)
