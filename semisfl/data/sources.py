"""Find images by name or path: ``load("digits")``, ``load("path/to/images")``.

A run may take the clients' images from another place than the labelled ones: `join`.
"""

import os
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import torch

from semisfl.data import hub, npz, places
from semisfl.data.dataset import Dataset
from semisfl.data.decode import Source
from semisfl.data.folder import class_name
from semisfl.settings import catalog, lookup
from semisfl.settings.catalog import NamedData
from semisfl.settings.counts import plural


def load(
    name: str,
    *,
    size: int | None = None,
    like: Dataset | None = None,
    tested: bool = True,
    cache: Path | None = None,
) -> Dataset:
    """Return a named set, or the images at a path.

    ``name`` is tried in this order:

    1. A data set of the catalog. ``digits`` is in the package; the others are looked for in
       ``$SEMISFL_DATA`` and then fetched through Hugging Face ``datasets``.
    2. A path: a ``.npz`` with its other shards, their common prefix, a folder of images, a CSV file
       that lists images, or a Hugging Face copy. ``~`` and variables are expanded.
    3. The name of a file or folder in ``$SEMISFL_DATA``, or of ``$SEMISFL_DATA`` itself.

    Images at a path are normalised by 0.5 and 0.5. Images of different sizes are resized to the most
    common size, or to ``size`` squared; the ``notes`` of the result say so. With ``like``, images get
    the size, channels and statistics of that set. Only sets that are ``tested`` need test images.
    """
    if size is not None and size < 1:
        raise ValueError(f"size = {size} is below 1 pixel; use 1 or more")
    if entry := lookup.data(name):
        return _check(_load_named(entry, size, like, cache), tested)
    path = Path(os.path.expanduser(os.path.expandvars(name)))
    source = (places.source_at(path) or _in_environment(name)) if name.strip() else None
    if source is None:
        searched = os.environ.get("SEMISFL_DATA", "not set")
        raise ValueError(
            f"data {name!r} is neither a known set ({', '.join(catalog.DATA)}) nor a path to images, also not in "
            f"the folder SEMISFL_DATA, which is {searched}"
        )
    return _check(_load(source, None, size, like, cache), tested)


load_data = load
"""The package's public name: its `load` opens a trained model."""


def _load_named(
    entry: NamedData, size: int | None, like: Dataset | None, cache: Path | None
) -> Dataset:
    if entry.file is not None:
        package, _, file = entry.file.partition(":")
        source = npz.source([Path(str(resources.files(package) / file))])
    else:
        source = _in_environment(entry.name, entry.subset) or hub.download(entry)
        source = replace(source, name=entry.name)
    return _load(source, entry, size, like, cache)


def _in_environment(name: str, subset: str | None = None) -> Source | None:
    """Return what ``$SEMISFL_DATA`` holds under a name, or itself if it has that name; None if it holds nothing."""
    place = os.environ.get("SEMISFL_DATA")
    if not place:
        return None
    root = Path(os.path.expanduser(place))
    if not root.exists():
        raise ValueError(f"SEMISFL_DATA = {place} does not exist; correct or unset it")
    inside = places.source_at(root / name, subset) if root.is_dir() else None
    if inside is None and npz.is_called(root, name):
        return places.source_at(root, subset)
    return inside


def _load(
    source: Source,
    entry: NamedData | None,
    size: int | None,
    like: Dataset | None,
    cache: Path | None,
) -> Dataset:
    """Return the images of a source, normalised as ``like`` or the catalog's ``entry`` says.

    ``size`` is the side in pixels; None: the entry's, else the most common one. With ``like``, its size.
    """
    normalised_as = like or entry
    side = size or (entry.size if entry else None)
    sides = like.shape[1:] if like else (side, side) if side else None
    decoded = places.decode_once(
        source, sides, len(normalised_as.mean) if normalised_as else None, cache
    )
    return Dataset.from_decoded(source.name, decoded, normalised_as)


def _check(dataset: Dataset, tested: bool) -> Dataset:
    """Return a data set on which accuracy can be measured and whose classes can be learned; else raise ValueError.

    Sets that are not ``tested`` need neither.
    """
    if not tested:
        return dataset
    dataset = with_classes(dataset)
    known = set(dataset.labels.tolist()) - {-1}
    if known and not len(dataset.test_labels):
        raise ValueError(
            f"{dataset.name} has no test images, so accuracy could not be measured; put some into "
            "test/<class>/, or write split = test in their lines of a CSV file"
        )
    if untrained := sorted(set(dataset.test_labels.tolist()) - known):
        raise ValueError(
            f"{dataset.name} has test images of a class without training images: "
            f"{dataset.classes[untrained[0]]}; add some, or leave out its test images"
            + "".join(f" ({note})" for note in dataset.notes)
        )
    return dataset


def with_classes(dataset: Dataset) -> Dataset:
    """Return a set without labels whose two or more folders are taken for its classes; other sets as they are.

    The last fifth of each class is for testing: photographs that were taken in a row then lie on one side. Images of a
    folder ``unlabeled`` keep no label.
    """
    folders = {class_name(name): rows for name, rows in (dataset.clients or {}).items()}
    unlabeled = folders.pop("unlabeled", np.empty(0, np.int64))
    if dataset.classes or len(folders) < 2:
        return dataset
    labels = dataset.labels.clone()
    for number, rows in enumerate(folders.values()):
        labels[rows] = number
    parts = [np.split(rows, [len(rows) - len(rows) // 5]) for rows in folders.values()]
    train = np.concatenate([*(part for part, _ in parts), unlabeled])
    test = np.concatenate([part for _, part in parts])
    note = (
        f"{dataset.name} has no folders train and test: its folders are the classes ({', '.join(folders)}), and the "
        f"last fifth of each, by name, is for testing ({plural(len(test), 'image')})"
    )
    return replace(
        dataset,
        classes=tuple(folders),
        images=dataset.images[train],
        labels=labels[train],
        test_images=dataset.images[test],
        test_labels=labels[test],
        clients=None,
        notes=(*dataset.notes, note),
    )


def join(labeled: Dataset, unlabeled: Dataset) -> Dataset:
    """Return one data set of two (``data.unlabeled``): the server's images first, then the clients'.

    Of ``labeled`` only the labelled training images and the test images are used. Of ``unlabeled`` the
    test images are left out, and if it has client folders, also images outside them. The clients' labels
    are kept, for the partition and statistics, if both sets have the same classes. Raises ValueError if
    ``labeled`` has no labelled image.
    """
    known = labeled.labels >= 0
    if not known.any():
        raise ValueError(
            f"{labeled.name} has no labelled training images for the server; add some, or set data.name to another set"
        )
    # Images outside client folders, or in a single one, are divided among all clients.
    holders = unlabeled.clients if unlabeled.clients and len(unlabeled.clients) > 1 else None
    images, labels, clients = unlabeled.images, unlabeled.labels, None
    served = int(known.sum())
    if holders:
        taken = np.sort(np.concatenate(list(holders.values())))
        images, labels = images[taken], labels[taken]
        clients = {name: served + np.searchsorted(taken, rows) for name, rows in holders.items()}
    if unlabeled.classes != labeled.classes:
        labels = torch.full_like(labels, -1)
    return replace(
        labeled,
        images=torch.cat([labeled.images[known], images]),
        labels=torch.cat([labeled.labels[known], labels]),
        clients=clients,
        served=served,
        notes=(*labeled.notes, *unlabeled.notes),
    )
