"""Find images by name or path: ``load("digits")``, ``load("path/to/images")``."""

import os
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np

from semisfl.data import cached, hub, npz, places
from semisfl.data.dataset import Dataset
from semisfl.data.decode import Listing, Source
from semisfl.settings import lookup
from semisfl.settings.entries import NamedData


def load(
    name: str,
    *,
    size: int | None = None,
    like: Dataset | None = None,
    tested: bool = True,
    labeled_only: bool = False,
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
    ``labeled_only`` leaves out images without a label at a path.
    """
    if size is not None and size < 1:
        raise ValueError(f"size = {size} is below 1 pixel; use 1 or more")
    if entry := lookup.DATA.find(name):
        return _checked(_named(entry, size, like, cache), tested)
    path = Path(os.path.expanduser(os.path.expandvars(name)))
    source = (places.at(path) or _in_environment(name)) if name.strip() else None
    if source is None:
        raise ValueError(
            f"data {name!r} is neither a known set ({', '.join(lookup.DATA.all())}) nor a path to images"
            f"{_searched()}"
        )
    if labeled_only:
        dataset = replace(_dataset(_labeled(source), None, size, like, cache), name=source.name)
    else:
        dataset = _dataset(source, None, size, like, cache)
    return _checked(dataset, tested)


load_data = load
"""The package's public name: its `load` opens a trained model."""


def _labeled(source: Source) -> Source:
    """Return the images of a source that have a label, and its test images: what a server of devices uses."""

    def listing() -> Listing:
        whole = source.listing()
        places = np.arange(len(whole.labels))
        kept = places[(whole.labels >= 0) | (places >= whole.trains)]
        trains = int((kept < whole.trains).sum())
        if not trains or len(kept) == len(places):
            return whole
        holder = None if whole.holder is None else whole.holder[kept]
        held = holder is not None and (holder >= 0).any()
        return replace(
            whole,
            names=[whole.names[place] for place in kept],
            open=lambda place: whole.open(int(kept[place])),
            labels=whole.labels[kept],
            trains=trains,
            holders=whole.holders if held else (),
            holder=holder if held else None,
            pixels=None if whole.pixels is None else whole.pixels[kept],
        )

    return Source(f"{source.name}-labeled", source.files, listing)


def _named(entry: NamedData, size: int | None, like: Dataset | None, cache: Path | None) -> Dataset:
    if entry.file is not None:
        package, _, file = entry.file.partition(":")
        source = npz.source([Path(str(resources.files(package) / file))])
    else:
        source = _in_environment(entry.name, entry.subset) or _download(entry)
        source = replace(source, name=entry.name)
    return _dataset(source, entry, size, like, cache)


def _download(entry: NamedData) -> Source:
    if entry.repository is None:
        raise ValueError(
            f"{entry.name} is not in SEMISFL_DATA, and no other place is known for it; put it there"
        )
    return hub.download(entry)


def _in_environment(name: str, subset: str | None = None) -> Source | None:
    """Return what ``$SEMISFL_DATA`` holds under a name, or itself if it has that name."""
    place = os.environ.get("SEMISFL_DATA")
    if not place:
        return None
    root = Path(os.path.expanduser(place))
    if not root.exists():
        raise ValueError(f"SEMISFL_DATA = {place} does not exist; correct or unset it")
    inside = places.at(root / name, subset) if root.is_dir() else None
    if inside is None and npz.is_called(root, name):
        return places.at(root, subset)
    return inside


def _dataset(
    source: Source,
    entry: NamedData | None,
    size: int | None,
    like: Dataset | None,
    cache: Path | None,
) -> Dataset:
    normalised_as = like or entry
    side = size or (entry.size if entry else None)
    sides = like.shape[1:] if like else (side, side) if side else None
    decoded = cached.decoded(
        source, sides, len(normalised_as.mean) if normalised_as else None, cache
    )
    return Dataset.from_decoded(source.name, decoded, normalised_as)


def _checked(dataset: Dataset, tested: bool) -> Dataset:
    """Check that accuracy can be measured, on classes that can be learned."""
    if not tested:
        return dataset
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


def _searched() -> str:
    place = os.environ.get("SEMISFL_DATA")
    unset = "; a relative name is looked for here and in the folder SEMISFL_DATA, which is not set"
    return f", nor in SEMISFL_DATA = {place}" if place else unset
