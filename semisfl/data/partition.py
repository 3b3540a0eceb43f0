"""Divide a data set: labelled images for the server, unlabelled ones for every client.

The rule is that of the published code (per class, in seeded order: the server's share first, then
the clients'), with two differences:

- The published code rounds every share on its own and leaves the remainder unused. Here cumulative
  rounding assigns every image: a partition is disjoint and complete, and the server gets exactly
  `labeled` labels.
- The published code may leave a client without images. Here such a client gets one image of the
  largest client.

A share of the images can be set aside for validation before that: nobody trains on them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from semisfl import seeds
from semisfl.settings.counts import plural

if TYPE_CHECKING:
    from semisfl.data.dataset import Dataset

log = logging.getLogger(__name__)

Kind = Literal["iid", "dirichlet"]
NONE = np.empty(0, np.int64)
UNKNOWN, SET_ASIDE = -1, -2
"""Stand in the place of a label."""


@dataclass(frozen=True)
class Partition:
    """Sorted int64 index arrays into ``Dataset.images``; lists, tuples and tensors of integers become such arrays."""

    labeled: np.ndarray
    clients: tuple[np.ndarray, ...]
    validation: np.ndarray = field(default_factory=NONE.copy)
    """Images that nobody trains on and that rounds are tested on. Empty: the test set is used."""
    names: tuple[str, ...] = ()
    """Names of the clients, if folders give them; empty: they have numbers only."""

    def __post_init__(self) -> None:
        clients = tuple(
            _indices(f"clients[{place}]", held) for place, held in enumerate(self.clients)
        )
        object.__setattr__(self, "clients", clients)
        for name in ("labeled", "validation"):
            object.__setattr__(self, name, _indices(name, getattr(self, name)))

    def unused(self, images: int) -> int:
        """Return how many of a set's ``images`` nobody holds."""
        return images - len(self.labeled) - len(self.validation) - sum(map(len, self.clients))


def _indices(name: str, images: Any) -> np.ndarray:
    """Return image numbers as an int64 array; refuse floats and masks."""
    array = np.asarray(images)
    if not array.size:
        return NONE.copy()
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{name} of the partition is {array.dtype} {list(array.shape)}; it must be a list of image numbers "
            "(np.flatnonzero makes one of a mask)"
        )
    return np.ascontiguousarray(array, np.int64)


def set_aside(dataset: Dataset, share: float, seed: int) -> np.ndarray:
    """Return indices for validation: ``share`` of the labelled images of every class, at least one each.

    A class with a single image keeps it for training. Images of client folders, or loaded for clients only,
    are not among them. The choice depends on ``seed`` and ``share`` alone, so that runs with other settings
    are tested on the same images.
    """
    labels = dataset.labels.numpy().copy()
    labels[len(labels) if dataset.served is None else dataset.served :] = UNKNOWN
    labels[np.concatenate([NONE, *(dataset.clients or {}).values()])] = UNKNOWN
    classes = dataset.classes
    counts = np.bincount(labels[labels >= 0], minlength=len(classes))
    known = int(counts.sum())
    counts[counts == 1] = 0
    if known and not counts.any():
        raise ValueError(
            f"data.validation = {share:g} needs a class with two labelled images; set it to none"
        )
    wanted, least = round(share * int(counts.sum())), int(np.count_nonzero(counts))
    taken = _apportion(counts, max(wanted, least))
    if least >= 2 * share * known > 0:
        log.warning(
            "data.validation = %g takes %d of %d labelled training images, as each class needs one; "
            "data.validation=none judges rounds on the test images and keeps all for training",
            share,
            least,
            known,
        )
    for name, count, take in zip(classes, counts, taken, strict=True):
        if count and take == count:
            raise ValueError(
                f"data.validation = {share:g} leaves no image of class {name} to train on (it has {count}); "
                "use a smaller share, or none"
            )
    rows = _by_class(labels, len(classes), seed, "validation")
    return np.sort(np.concatenate([part[:take] for part, take in zip(rows, taken, strict=True)]))


def split(
    labels: np.ndarray,
    *,
    labeled: int,
    clients: int,
    kind: Kind,
    alpha: float = 0.1,
    seed: int,
    classes: int,
    served: int | None = None,
    validation: np.ndarray = NONE,
) -> Partition:
    """Return a partition; images of unknown label (-1) go to clients only, ``validation`` to nobody.

    Args:
        labels: int64 [n] of all training images.
        labeled: how many labelled images the server gets, |D_l|.
        clients: the number of clients, N.
        kind: equal shares of every class (iid), or shares drawn from Dir(alpha).
        alpha: the concentration; smaller is more uneven.
        seed: the run's seed.
        classes: the number of classes.
        served: the first so many images are the server's alone, labelled or unused; clients get the others.
        validation: indices of images that nobody trains on.

    The labelled images depend on ``seed`` and ``labeled`` alone, not on the number of clients or the skew, so that
    runs which differ in those have the same labels. Raises ValueError if there are too few images.
    """
    labels = np.array(labels, dtype=np.int64)
    labels[validation] = SET_ASIDE
    places = np.arange(len(labels))
    mine = labels if served is None else np.where(places < served, labels, -1)
    by_class = _stratify(mine, labeled, classes, seed, len(validation))
    rests = [rest for _, rest in by_class]
    if served is not None:
        rests = _by_class(np.where(places < served, -1, labels), classes, seed)
    elsewhere = int(np.count_nonzero((labels != SET_ASIDE) & (places >= (served or 0))))
    elsewhere -= labeled if served is None else 0
    _check_clients(elsewhere, labeled, clients, len(validation))
    shares = _shares(kind, alpha, clients, classes, seed)
    parts_of: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label, rest in enumerate(rests):
        # The same client would get the rounded-up share of every class if the order were fixed.
        order = seeds.generator(seed, "partition", "order", label).permutation(clients)
        bounds = np.rint(np.cumsum(shares[label, order])[:-1] * len(rest)).astype(np.int64)
        for client, part in zip(order, np.split(rest, bounds), strict=True):
            parts_of[client].append(part)

    unknown = seeds.generator(seed, "partition", "unknown").permutation(
        np.flatnonzero((labels == UNKNOWN) & (places >= (served or 0)))
    )
    for parts, part in zip(parts_of, np.array_split(unknown, clients), strict=True):
        parts.append(part)

    held = [np.concatenate(parts) for parts in parts_of]
    _fill_empty(held)
    return Partition(
        labeled=np.sort(np.concatenate([chosen for chosen, _ in by_class])),
        clients=tuple(np.sort(rows) for rows in held),
        validation=validation,
    )


def split_by_folder(
    dataset: Dataset, labeled: int, seed: int, validation: np.ndarray = NONE
) -> Partition:
    """Return a partition by client folders; the server's labels are drawn from the other images.

    Clients are in the order of ``dataset.clients``. Labelled images beyond ``labeled`` stay
    unused: they are on the server, so no client can train on them.
    """
    if not dataset.clients:
        raise ValueError(
            f"data set {dataset.name!r} has no client folders; use partition kind iid or dirichlet"
        )
    held = tuple(np.sort(np.asarray(rows, dtype=np.int64)) for rows in dataset.clients.values())
    mine = server_alone(dataset, labeled, seed, validation)
    return Partition(mine.labeled, held, validation, tuple(dataset.clients))


def server_alone(
    dataset: Dataset, labeled: int, seed: int, validation: np.ndarray = NONE
) -> Partition:
    """Return a partition without clients, with the same labelled images as `split` or `split_by_folder`."""
    labels = dataset.labels.numpy().copy()
    labels[np.concatenate([NONE, *(dataset.clients or {}).values(), validation])] = UNKNOWN
    served = _stratify(labels, labeled, len(dataset.classes), seed, len(validation))
    mine = [part for part, _ in served]
    return Partition(np.sort(np.concatenate([NONE, *mine])), (), validation)


def _check_clients(left: int, labeled: int, clients: int, aside: int) -> None:
    if clients > left:
        raise ValueError(
            f"clients.total = {clients} exceeds the {plural(left, 'image')} left for them "
            f"({labeled} are labelled on the server{f', {aside} are for validation' if aside else ''}); "
            f"use fewer clients or labels{', or data.validation=none' if aside else ''}"
        )


def _shares(kind: Kind, alpha: float, clients: int, classes: int, seed: int) -> np.ndarray:
    """Return [classes, clients]: the share of each class that each client gets; rows sum to 1.

    ``iid``: equal shares. ``dirichlet``: each client draws its mix of classes p_i ~ Dir(alpha 1_M),
    and s_ci = p_ic / sum_j p_jc.
    """
    if kind == "iid":
        return np.full((classes, clients), 1 / clients)
    generator = seeds.generator(seed, "partition", "dirichlet")
    wanted = generator.dirichlet(np.full(classes, alpha), size=clients).T
    total = wanted.sum(axis=1, keepdims=True)
    # At alpha = 0.01 draws underflow to 0; a class with no share at all is divided evenly.
    return np.where(total > 0, wanted / np.where(total > 0, total, 1), 1 / clients)


def _stratify(
    labels: np.ndarray, labeled: int, classes: int, seed: int, aside: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return, per class and in seeded order, the server's indices and the others.

    ``aside``: how many images are kept for validation, for the error.
    """
    counts = np.bincount(labels[labels >= 0], minlength=classes)
    if labeled > counts.sum():
        raise ValueError(
            f"data.labeled = {labeled} exceeds the {counts.sum()} training images with a known label"
            f"{f', besides {aside} for validation' if aside else ''}; use data.labeled={counts.sum()} or fewer"
        )
    if labeled < classes:
        raise ValueError(
            f"data.labeled = {labeled} is below the {classes} classes; use {classes} or more"
        )
    seats = _apportion(counts, labeled)
    rows = _by_class(labels, classes, seed)
    return [(part[:take], part[take:]) for part, take in zip(rows, seats, strict=True)]


def _by_class(
    labels: np.ndarray, classes: int, seed: int, purpose: str = "shuffle"
) -> list[np.ndarray]:
    """Return the indices of each class, in seeded order."""
    shuffles = (seeds.generator(seed, "partition", purpose, label) for label in range(classes))
    return [
        shuffle.permutation(np.flatnonzero(labels == label))
        for label, shuffle in enumerate(shuffles)
    ]


def _apportion(counts: np.ndarray, total: int) -> np.ndarray:
    """Return ``total`` divided by class size: largest remainder, at least one for every class present."""
    quota = counts * total / max(counts.sum(), 1)
    seats: np.ndarray = np.maximum(np.floor(quota).astype(np.int64), np.minimum(counts, 1))
    while seats.sum() < total:
        seats[np.argmax(np.where(seats < counts, quota - seats, -np.inf))] += 1
    while seats.sum() > total:  # many tiny classes were raised to one
        seats[np.argmax(np.where(seats > 1, seats - quota, -np.inf))] -= 1
    return seats


def _fill_empty(held: list[np.ndarray]) -> None:
    """Give a client without images one of the largest client's, in place."""
    for client, rows in enumerate(held):
        if not rows.size:
            largest = max(range(len(held)), key=lambda other: held[other].size)
            held[client], held[largest] = held[largest][-1:], held[largest][:-1]
