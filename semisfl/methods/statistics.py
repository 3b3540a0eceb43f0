"""How good a round's pseudo-labels were: what the paper calls mask rate and impurity, and coverage."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from semisfl.fleet.base import Features


def of_step(
    features: Features, active: Sequence[int], labels: Tensor, confident: Tensor, classes: int
) -> dict[str, Tensor]:
    """Sums of one step, for a `Meter`; those by client in the order of ``active``, who answered or not."""
    # A captured step pays for every kernel: what follows from other sums is left to `of_round`.
    kept = confident.float()
    counts = {
        "client_rows": kept.new_full((len(features.clients),), features.batch),
        "client_kept": kept.view(len(features.clients), -1).sum(1),
    }
    if features.clients != tuple(active):
        places = torch.tensor([active.index(client) for client in features.clients])
        places = places.to(kept.device)
        counts = {
            name: kept.new_zeros(len(active)).index_copy(0, places, sums)
            for name, sums in counts.items()
        }
    if features.truth is not None:
        every = torch.arange(classes, device=labels.device)
        by_class = (features.truth.unsqueeze(1) == every).float()
        counts |= {
            "right": (kept * (labels == features.truth)).sum(),
            "class_rows": by_class.sum(0),
            "class_kept": (by_class * kept.unsqueeze(1)).sum(0),
        }
    return counts


LOSSES = ("loss_semi", "loss_consistency", "loss_clustering")


def of_split_round(sums: dict[str, Any], clients: Sequence[int], steps: int) -> dict[str, Any]:
    """Fields of a `MethodRow` from the sums of a split round's ``steps``; ``clients``: the active ones."""
    losses = {name: sums[name] / steps for name in LOSSES if name in sums}
    # Who leaves a round does not come back to it: the rows of those who stayed are the most.
    rows = sums["client_rows"]
    return {"contributing": rows.count(max(rows)), **losses, **of_round(sums, clients)}


def of_round(sums: dict[str, Any], clients: Sequence[int]) -> dict[str, Any]:
    """Rates of a round from the sums of its steps.

    mask_rate: share of images whose label is not confident. impurity: share of wrong ones among
    the confident, where true labels are known. coverage: share of confident images, by true class
    and by client.
    """
    if "client_rows" not in sums:
        return {}
    rates: dict[str, Any] = {
        "mask_rate": 1 - sum(sums["client_kept"]) / sum(sums["client_rows"]),
        "coverage_by_client": dict(
            zip(map(str, clients), _shares(sums["client_kept"], sums["client_rows"]), strict=True)
        ),
    }
    if sum(sums.get("class_rows", ())):
        known_kept = sum(sums["class_kept"])
        rates["impurity"] = 1 - sums["right"] / known_kept if known_kept else None
        rates["coverage_by_class"] = _shares(sums["class_kept"], sums["class_rows"])
    return rates


def _shares(parts: list[float], wholes: list[float]) -> list[float | None]:
    return [part / whole if whole else None for part, whole in zip(parts, wholes, strict=True)]
