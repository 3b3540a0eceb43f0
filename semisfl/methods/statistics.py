"""Count how good a round's pseudo-labels were: the paper's mask rate and impurity, and coverage.

Labels are counted in a table [3, 1 + classes]: images, those whose label is kept (confident), and
the wrong ones among these, by true class. The first column is for images whose class is not known;
on a real device, which has no true labels, that is all of them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from semisfl.fleet.base import Features

LOSSES = ("loss_semi", "loss_consistency", "loss_clustering")
COUNTS = ("images", "kept", "wrong")
Table = Sequence[Sequence[float]]


def table(labels: Tensor, kept: Tensor, truth: Tensor, classes: int) -> Tensor:
    """Return the counts [3, 1 + classes] of some images: all, kept and wrong, by true class.

    ``labels`` and ``kept`` [n]: the pseudo-labels and which are confident. ``truth`` [n]: -1 where it is not known.
    """
    kept = kept.float()
    counted = torch.stack([torch.ones_like(kept), kept, kept * (labels != truth)])
    # No matrix product: that would count in the models' precision.
    columns = torch.arange(-1, classes, device=labels.device)
    return (counted.unsqueeze(2) * (truth.unsqueeze(1) == columns)).sum(1)


def of_classes(counts: Table) -> dict[str, Any]:
    """Return the fields of a `MethodMetrics` that need true labels; none of them if no image's is known.

    ``impurity``: the share of kept labels that are wrong. ``coverage_by_class``: the share of a class's
    images whose label is kept.
    """
    images, kept, wrong = (row[1:] for row in counts)
    if not sum(images):
        return {}
    return {
        "impurity": sum(wrong) / sum(kept) if sum(kept) else None,
        "coverage_by_class": _shares(kept, images),
    }


def _shares(parts: Sequence[float], wholes: Sequence[float]) -> list[float | None]:
    return [part / whole if whole else None for part, whole in zip(parts, wholes, strict=True)]


# --- split rounds: the server sees every label ------------------------------------------------------


def of_step(
    features: Features, active: Sequence[int], labels: Tensor, confident: Tensor, classes: int
) -> dict[str, Tensor]:
    """Return the sums of one step, for a `Meter`; those by client are in the order of ``active``, 0 for the absent."""
    # Every operation of a step costs time: what follows from other sums is left to `of_split_round`.
    kept = confident.float()
    sums = {
        "client_images": kept.new_full((len(features.clients),), features.batch),
        "client_kept": kept.view(len(features.clients), -1).sum(1),
    }
    if features.clients != tuple(active):
        places = torch.tensor([active.index(client) for client in features.clients])
        places = places.to(kept.device)
        sums = {
            name: kept.new_zeros(len(active)).index_copy(0, places, one)
            for name, one in sums.items()
        }
    truth = torch.full_like(labels, -1) if features.truth is None else features.truth
    return {**sums, "by_class": table(labels, kept, truth, classes)}


def of_split_round(sums: dict[str, Any], active: Sequence[int], steps: int) -> dict[str, Any]:
    """Return the fields of a `MethodMetrics` from the sums of a split round's ``steps``."""
    images, kept = sums["client_images"], sums["client_kept"]
    return {
        # A client that leaves a round does not come back to it: those that stayed have the most images.
        "contributing": images.count(max(images)),
        **{name: sums[name] / steps for name in LOSSES if name in sums},
        "mask_rate": 1 - sum(kept) / sum(images),
        "coverage_by_client": dict(zip(map(str, active), _shares(kept, images), strict=True)),
        **of_classes(sums["by_class"]),
    }


# --- full-model rounds: clients count, and answer with numbers -----------------------------------------


def as_numbers(counts: Table) -> dict[str, float]:
    """Return a client's counts of its labels; by class only in a simulation, which knows the true ones."""
    images, kept, _ = counts
    by_class = {
        f"{name}/{label}": value
        for name, row in zip(COUNTS, counts, strict=True)
        for label, value in enumerate(row[1:])
    }
    return {"coverage": sum(kept) / sum(images), **(by_class if sum(images[1:]) else {})}


def of_numbers(numbers: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the fields of a `MethodMetrics` from the `as_numbers` of several clients."""
    total = Counter[str]()
    for one in numbers:
        total.update({key: value for key, value in one.items() if "/" in key})
    classes = len(total) // len(COUNTS)
    counts = [[0, *(total[f"{name}/{label}"] for label in range(classes))] for name in COUNTS]
    return {
        "mask_rate": 1 - sum(one["coverage"] for one in numbers) / len(numbers),
        **of_classes(counts),
    }
