"""Who holds what: the server's labelled images and every client's unlabelled ones.

The rule is that of the published code (per class, in seeded order: the server's share first, then
the clients'), with two declared divergences:

- the published code rounds every share by itself and leaves the remainder unused; here cumulative
  rounding assigns every image, so a partition is disjoint and complete, and the server gets
  exactly as many labels as asked for;
- the published code lets a client end up with nothing; here such a client takes one image from
  the largest one.

Before all that, a share of the images can be set aside for validation: nobody trains on them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from semisfl import seeds
from semisfl.files import save_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from semisfl.data.sources import Dataset

Kind = Literal["iid", "dirichlet"]
NONE = np.empty(0, np.int64)
UNKNOWN, SET_ASIDE = -1, -2
"""In the place of a label."""
LONGEST_NAME = 32
"""Letters of a class's name in a picture."""


@dataclass(frozen=True)
class Partition:
    """Sorted int64 index arrays into ``Dataset.images``."""

    labeled: np.ndarray
    clients: tuple[np.ndarray, ...]
    validation: np.ndarray = field(default_factory=NONE.copy)
    """Nobody's; rounds are judged on them. Empty: on the test set."""


def set_aside(dataset: Dataset, share: float, seed: int) -> np.ndarray:
    """Rows for validation: of every class its share of the images with a label, at least one of each.

    What a client's folder holds, or was loaded for clients alone, is not among them. They depend on
    ``seed`` and ``share`` alone, so that runs which differ in the rest are judged on the same images.
    """
    labels = dataset.labels.numpy().copy()
    labels[len(labels) if dataset.served is None else dataset.served :] = UNKNOWN
    labels[np.concatenate([NONE, *(dataset.clients or {}).values()])] = UNKNOWN
    classes = dataset.classes
    counts = np.bincount(labels[labels >= 0], minlength=len(classes))
    wanted = round(share * int(counts.sum()))
    taken = _apportion(counts, max(wanted, int(np.count_nonzero(counts))))
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
    alpha: float | None = None,
    seed: int,
    classes: int,
    served: int | None = None,
    validation: np.ndarray = NONE,
) -> Partition:
    """Deal images to the server and the clients; images of unknown label (-1) to clients only.

    Those of ``validation`` are dealt to nobody.

    With ``served``, the images before it are the server's alone, labelled or unused, and the clients
    are dealt the others.

    The labelled images depend on ``seed`` and ``labeled`` alone, not on the number of clients or
    the skew, so that runs which differ in those share their labels.
    """
    labels = np.array(labels, dtype=np.int64)
    labels[validation] = SET_ASIDE
    places = np.arange(len(labels))
    mine = labels if served is None else np.where(places < served, labels, -1)
    by_class = _stratified(mine, labeled, classes, seed)
    rests = [rest for _, rest in by_class]
    if served is not None:
        rests = _by_class(np.where(places < served, -1, labels), classes, seed)
    elsewhere = int(np.count_nonzero((labels != SET_ASIDE) & (places >= (served or 0))))
    elsewhere -= labeled if served is None else 0
    _check_clients(elsewhere, labeled, clients, classes)
    shares = _shares(kind, alpha, clients, classes, seed)
    hands: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label, rest in enumerate(rests):
        # The same client would get the rounded-up share of every class if the order were fixed.
        order = seeds.generator(seed, "partition", "order", label).permutation(clients)
        bounds = np.rint(np.cumsum(shares[label, order])[:-1] * len(rest)).astype(np.int64)
        for client, part in zip(order, np.split(rest, bounds), strict=True):
            hands[client].append(part)

    unknown = seeds.generator(seed, "partition", "unknown").permutation(
        np.flatnonzero((labels == UNKNOWN) & (places >= (served or 0)))
    )
    for hand, part in zip(hands, np.array_split(unknown, clients), strict=True):
        hand.append(part)

    held = [np.concatenate(hand) for hand in hands]
    _fill_empty(held)
    return Partition(
        labeled=np.sort(np.concatenate([chosen for chosen, _ in by_class])),
        clients=tuple(np.sort(hand) for hand in held),
        validation=validation,
    )


def by_folder(
    dataset: Dataset, labeled: int, seed: int, validation: np.ndarray = NONE
) -> Partition:
    """Clients as the folders say; the server's labels are drawn from what no client holds.

    Clients come in the order of ``dataset.clients``. Labelled images beyond ``labeled`` stay
    unused: they lie on the server, so no client could train on them.
    """
    if not dataset.clients:
        raise ValueError(
            f"data set {dataset.name!r} has no client folders; use partition kind iid or dirichlet"
        )
    labels = dataset.labels.numpy().copy()
    held = tuple(np.sort(np.asarray(rows, dtype=np.int64)) for rows in dataset.clients.values())
    labels[np.concatenate([*held, validation])] = UNKNOWN
    served = _stratified(labels, labeled, len(dataset.classes), seed)
    mine = [part for part, _ in served]
    return Partition(np.sort(np.concatenate([NONE, *mine])), held, validation)


def _check_clients(left: int, labeled: int, clients: int, classes: int) -> None:
    if clients < 1 or classes < 1:
        raise ValueError(f"clients = {clients} and classes = {classes} must both be at least 1")
    if clients > left:
        raise ValueError(
            f"clients = {clients} exceeds the {left} images left for them "
            f"({labeled} are labelled on the server); use fewer clients or labels"
        )


def _iid(alpha: float | None, clients: int, classes: int, seed: int) -> np.ndarray:
    return np.full((classes, clients), 1 / clients)


def _dirichlet(alpha: float | None, clients: int, classes: int, seed: int) -> np.ndarray:
    """s_ci = p_ic / sum_j p_jc with p_i ~ Dir(alpha 1_M): each client draws its mix of classes."""
    if alpha is None or not 0 < alpha < np.inf:
        raise ValueError(f"alpha = {alpha} is not a positive number; 0.1 is strongly skewed")
    generator = seeds.generator(seed, "partition", "dirichlet")
    wanted = generator.dirichlet(np.full(classes, alpha), size=clients).T
    total = wanted.sum(axis=1, keepdims=True)
    # At alpha = 0.01 draws underflow to 0; a class that nobody wants is dealt evenly.
    return np.where(total > 0, wanted / np.where(total > 0, total, 1), 1 / clients)


_SHARES: dict[str, Callable[[float | None, int, int, int], np.ndarray]] = {
    "iid": _iid,
    "dirichlet": _dirichlet,
}


def _shares(kind: str, alpha: float | None, clients: int, classes: int, seed: int) -> np.ndarray:
    """[classes, clients]: which part of a class each client gets; rows sum to 1."""
    if kind not in _SHARES:
        raise ValueError(f"partition kind {kind!r} is unknown; known: {', '.join(_SHARES)}")
    return _SHARES[kind](alpha, clients, classes, seed)


def _stratified(
    labels: np.ndarray, labeled: int, classes: int, seed: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per class, in seeded order: (the server's rows, the others)."""
    if labels.size and labels.max() >= classes:
        raise ValueError(f"label {labels.max()} is outside the {classes} classes")
    counts = np.bincount(labels[labels >= 0], minlength=classes)
    if labeled > counts.sum():
        raise ValueError(
            f"labeled = {labeled} exceeds the {counts.sum()} training images with a known label"
        )
    if labeled < classes:
        raise ValueError(
            f"labeled = {labeled} is below the {classes} classes; each needs at least one label"
        )
    seats = _apportion(counts, labeled)
    rows = _by_class(labels, classes, seed)
    return [(part[:take], part[take:]) for part, take in zip(rows, seats, strict=True)]


def _by_class(
    labels: np.ndarray, classes: int, seed: int, purpose: str = "shuffle"
) -> list[np.ndarray]:
    """The rows of each class, in seeded order."""
    shuffles = (seeds.generator(seed, "partition", purpose, label) for label in range(classes))
    return [
        shuffle.permutation(np.flatnonzero(labels == label))
        for label, shuffle in enumerate(shuffles)
    ]


def _apportion(counts: np.ndarray, total: int) -> np.ndarray:
    """``total`` seats by class size: largest remainder, at least one for every class present."""
    quota = counts * total / max(counts.sum(), 1)
    seats: np.ndarray = np.maximum(np.floor(quota).astype(np.int64), np.minimum(counts, 1))
    while seats.sum() < total:
        seats[np.argmax(np.where(seats < counts, quota - seats, -np.inf))] += 1
    while seats.sum() > total:  # many tiny classes were lifted to one
        seats[np.argmax(np.where(seats > 1, seats - quota, -np.inf))] -= 1
    return seats


def _fill_empty(held: list[np.ndarray]) -> None:
    for client, rows in enumerate(held):
        if not rows.size:
            richest = max(range(len(held)), key=lambda other: held[other].size)
            held[client], held[richest] = held[richest][-1:], held[richest][:-1]


@dataclass(frozen=True)
class Holdings:
    """How many images of each class the server (first) and each client hold."""

    classes: list[str]
    counts: np.ndarray

    def as_json(self) -> str:
        server, *clients = self.counts.tolist()
        return json.dumps({"classes": self.classes, "server": server, "clients": clients})


def count(partition: Partition, labels: np.ndarray, classes: Sequence[str]) -> Holdings:
    labels = np.asarray(labels)
    rows = [*classes, *(["unknown"] if (labels < 0).any() else [])]
    held = [partition.labeled, *partition.clients]
    counts = [np.bincount(labels[one] % len(rows), minlength=len(rows)) for one in held]
    return Holdings(rows, np.stack(counts))


def draw(partition: Partition, labels: np.ndarray, classes: Sequence[str], path: Path) -> None:
    """A picture of who holds what, as a file."""
    save_picture(picture(partition, labels, classes), path)


def picture(partition: Partition, labels: np.ndarray, classes: Sequence[str]) -> Figure:
    """Who holds what: one column per holder, one row per class, area = images."""
    from matplotlib.figure import Figure  # heavy, and only wanted here

    holdings = count(partition, labels, classes)
    rows, counts = list(map(_short, holdings.classes)), holdings.counts.T
    holders = holdings.counts
    # Inches: names of classes need about 0.1 per letter, and the grid is what is left of the width.
    names_width = 0.1 * max(map(len, rows))
    grid_width = float(np.clip(1.5 + 0.3 * len(holders), 3.5, 15))
    height = float(np.clip(2.2 + 0.3 * len(rows), 3.5, 24))
    figure = Figure(figsize=(names_width + grid_width + 1, height), layout="constrained")
    totals, grid = figure.subplots(2, 1, sharex=True, height_ratios=[1, max(2, 0.3 * len(rows))])

    places = np.arange(len(holders)) + np.where(np.arange(len(holders)) > 0, 0.5, 0)
    colours = np.array(["tab:orange"] + ["tab:blue"] * len(partition.clients))
    totals.bar(places, counts.sum(axis=0), color=colours, width=0.7)
    totals.set_ylabel("images")
    totals.spines[["top", "right"]].set_visible(False)

    row, column = np.nonzero(counts)
    # The largest bubble fills its cell, whose side is 0.3 inch, or less on crowded pictures.
    side = 72 * min(0.3, (height - 2) / len(rows), grid_width / len(holders))
    area = (0.95 * side) ** 2 * counts[row, column] / max(counts.max(), 1)
    grid.scatter(places[column], row, s=np.maximum(area, 1), c=colours[column], linewidths=0)
    every = max(1, len(partition.clients) // 40)
    shown = [0, *range(1, len(holders), every)]
    names = ["server", *(str(client) for client in range(len(partition.clients)))]
    grid.set_xticks(places[shown], [names[place] for place in shown], rotation=90)
    grid.set_yticks(range(len(rows)), rows)
    grid.set_xlim(-0.7, places[-1] + 0.7)
    grid.set_ylim(len(rows) - 0.4, -0.6)
    # Of the figure, not of the grid, which is narrower than these words if names are long.
    figure.supxlabel("server's labels (orange) and clients by number (blue)", fontsize="medium")
    grid.grid(alpha=0.25)
    grid.set_axisbelow(True)
    return figure


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
