"""Images to train and test on, as uint8 tensors: ``load("digits")``, ``load("path/to/images")``.

Decoded images are cached under ``$SEMISFL_CACHE`` (else ``~/.cache/semisfl``), keyed by the names,
sizes and times of the files they came from. The cache may be deleted at any time.
"""

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

import numpy as np
import torch

from semisfl.data import decode, folder, hub, npz
from semisfl.data.decode import Decoded, Size, Source
from semisfl.files import write_whole
from semisfl.settings import lookup
from semisfl.settings.catalog import NamedData

CACHE_FORMAT = 1  # raise it when decoding changes: older cached copies are then passed over


@dataclass(frozen=True)
class Dataset:
    """Training images, labelled or not, and test images that training never sees."""

    name: str
    classes: tuple[str, ...]
    images: torch.Tensor  # uint8 [n, C, H, W]
    labels: torch.Tensor  # int64 [n]; -1 where unknown
    test_images: torch.Tensor  # uint8 [m, C, H, W]
    test_labels: torch.Tensor  # int64 [m]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    clients: dict[str, np.ndarray] | None = None  # where folders say who holds what
    served: int | None = None  # images before it are the server's alone, the others the clients'
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field, pixels in (("images", self.images), ("test_images", self.test_images)):
            if pixels.dtype != torch.uint8 or pixels.ndim != 4:
                raise ValueError(
                    f"{field} is {pixels.dtype} {list(pixels.shape)}; "
                    "it must be torch.uint8 [n, channels, height, width]"
                )
        if not len(self.images):
            raise ValueError("images holds no image; at least one is needed to train on")
        if self.images.shape[1:] != self.test_images.shape[1:]:
            raise ValueError(
                f"images are {list(self.images.shape[1:])} but test_images are "
                f"{list(self.test_images.shape[1:])}; resize one of them"
            )
        self._check_labels("labels", self.labels, len(self.images), lowest=-1)
        self._check_labels("test_labels", self.test_labels, len(self.test_images), lowest=0)
        channels = self.images.shape[1]
        if channels not in (1, 3):
            raise ValueError(f"images have {channels} channels; 1 (grey) or 3 (colour) are known")
        if not len(self.mean) == len(self.std) == channels or min(self.std) <= 0:
            raise ValueError(
                f"mean {self.mean} and std {self.std} need a number for each of the {channels} "
                "channels, std above 0"
            )
        self._check_clients()

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of an image: channels, height, width."""
        _, channels, height, width = self.images.shape
        return channels, height, width

    def _check_labels(self, field: str, labels: torch.Tensor, count: int, lowest: int) -> None:
        if labels.dtype != torch.int64 or labels.shape != (count,):
            raise ValueError(
                f"{field} is {labels.dtype} {list(labels.shape)}; it must be torch.int64 [{count}]"
            )
        if count and not lowest <= int(labels.min()) <= int(labels.max()) < len(self.classes):
            if lowest == -1 and int(labels.max()) == -1 == int(labels.min()):
                return  # a device's own images: no classes are known
            raise ValueError(
                f"{field} runs from {int(labels.min())} to {int(labels.max())}; it must lie in "
                f"{lowest}..{len(self.classes) - 1} for the {len(self.classes)} classes"
            )
        if len(self.classes) == 1:
            raise ValueError(f"classes has one entry, {self.classes[0]!r}; at least 2 are needed")

    def _check_clients(self) -> None:
        if self.clients is None:
            return
        rows = np.concatenate([np.empty(0, np.int64), *self.clients.values()])
        if rows.size and not (rows.min() >= 0 and rows.max() < len(self.images)):
            raise ValueError(f"clients names images outside 0..{len(self.images) - 1}")
        if len(np.unique(rows)) < len(rows):
            raise ValueError("clients names an image twice; each may have one holder only")
        if empty := [name for name, held in self.clients.items() if not len(held)]:
            raise ValueError(f"clients {', '.join(empty)} hold no images; remove them")


def load(
    name: str,
    *,
    size: int | None = None,
    like: Dataset | None = None,
    tested: bool = True,
    cache: Path | None = None,
) -> Dataset:
    """A named set, or the images at a path.

    ``name`` is, tried in this order:

    1. a data set of the catalog. ``digits`` is in the package; the others are looked for in
       ``$SEMISFL_DATA`` and then fetched through Hugging Face ``datasets``;
    2. a path (``~`` and variables are expanded, so ``"$SEMISFL_DATA"`` works): a ``.npz`` with its
       sister shards, their common prefix, a folder of images, or a Hugging Face copy;
    3. the name of a file or folder in ``$SEMISFL_DATA``, or of ``$SEMISFL_DATA`` itself.

    Paths have no known statistics and are normalised by 0.5/0.5. Images of different sizes are
    brought to the most common one, or to ``size`` squared; the ``notes`` of the result say so.
    With ``like`` they get the size, channels and statistics of that set. Unless they are ``tested``
    they need no test images.
    """
    if size is not None and size < 1:
        raise ValueError(f"size = {size} is below 1 pixel")
    if row := lookup.data_set(name):
        return _checked(_named(row, size, like, cache), tested)
    path = Path(os.path.expandvars(name)).expanduser()
    found = (_at(path) or _in_environment(name)) if name.strip() else None
    if found is None:
        raise ValueError(
            f"data {name!r} is neither a known set ({', '.join(lookup.data_sets())}) nor a path to images"
            f"{_searched()}"
        )
    return _checked(_dataset(found, None, size, like, cache), tested)


load_data = load
"""What the package calls it, whose own `load` opens a trained model."""


def _named(row: NamedData, size: int | None, like: Dataset | None, cache: Path | None) -> Dataset:
    if row.file is not None:
        package, _, file = row.file.partition(":")
        found = npz.source([Path(str(resources.files(package) / file))])
    else:
        found = replace(_in_environment(row.name, row.subset) or _download(row), name=row.name)
    return _dataset(found, row, size, like, cache)


def _download(row: NamedData) -> Source:
    if row.repository is None:
        raise ValueError(f"{row.name} is not in SEMISFL_DATA, and no other place is known for it")
    return hub.download(row)


def _at(path: Path, subset: str | None = None) -> Source | None:
    """What lies at a path, or None."""
    if hub.is_copy(path):
        return hub.copy(path, subset)
    if files := npz.find(path):
        return npz.source(files)
    if path.is_dir():
        return folder.source(path)
    if path.exists():
        raise ValueError(f"{path} is no data set; give a .npz file or a folder of images")
    return None


def _in_environment(name: str, subset: str | None = None) -> Source | None:
    """What ``$SEMISFL_DATA`` has under a name: inside it, or it is itself called so."""
    place = os.environ.get("SEMISFL_DATA")
    if not place:
        return None
    root = Path(place).expanduser()
    if not root.exists():
        raise ValueError(f"SEMISFL_DATA = {place} does not exist; correct or unset it")
    inside = _at(root / name, subset) if root.is_dir() else None
    if inside is None and npz.is_called(root, name):
        return _at(root, subset)
    return inside


def _dataset(
    source: Source,
    row: NamedData | None,
    size: int | None,
    like: Dataset | None,
    cache: Path | None,
) -> Dataset:
    shown = like or row
    side = size or (row.size if row else None)
    sides = like.shape[1:] if like else (side, side) if side else None
    found = _cached(source, sides, len(shown.mean) if shown else None, cache)
    channels = found.images.shape[1]
    holder = found.holder[: found.trains]
    return Dataset(
        name=source.name,
        classes=found.classes,
        images=torch.from_numpy(found.images[: found.trains]),
        labels=torch.from_numpy(found.labels[: found.trains]),
        test_images=torch.from_numpy(found.images[found.trains :]),
        test_labels=torch.from_numpy(found.labels[found.trains :]),
        mean=shown.mean if shown else (0.5,) * channels,
        std=shown.std if shown else (0.5,) * channels,
        clients={name: np.flatnonzero(holder == place) for place, name in enumerate(found.holders)}
        or None,
        notes=found.notes,
    )


def _checked(dataset: Dataset, tested: bool) -> Dataset:
    """Accuracy can be measured, and on classes that can be learned."""
    if not tested:
        return dataset
    known = set(dataset.labels.tolist()) - {-1}
    if known and not len(dataset.test_labels):
        raise ValueError(f"{dataset.name} has no test images; accuracy could not be measured")
    if untrained := sorted(set(dataset.test_labels.tolist()) - known):
        raise ValueError(
            f"{dataset.name} has test images of a class without training images: "
            f"{dataset.classes[untrained[0]]}"
        )
    return dataset


def _cached(source: Source, size: Size | None, channels: int | None, cache: Path | None) -> Decoded:
    """Decode a source, or read what an earlier call decoded."""
    if not source.files:
        return decode.decode(source.rows(), size, channels)
    if cache is None:
        cache = Path(os.environ.get("SEMISFL_CACHE") or Path.home() / ".cache" / "semisfl")
    file = cache / f"{source.name}-{_fingerprint(source, size, channels)}.npz"
    # Missing, truncated, damaged (every array has a checksum) or foreign: decode again.
    with contextlib.suppress(Exception):
        return _read_cache(file)
    found = decode.decode(source.rows(), size, channels)
    try:
        _write_cache(file, found)
    except OSError as error:
        note = f"decoded images could not be cached in {cache} ({error.strerror or error})"
        return replace(found, notes=(*found.notes, note))
    return found


def _fingerprint(source: Source, *options: Size | int | None) -> str:
    digest = hashlib.sha256(repr((CACHE_FORMAT, options)).encode())
    for file in source.files:
        stat = file.stat()
        digest.update(
            f"{file.absolute()}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode(
                errors="surrogateescape"
            )
        )
    return digest.hexdigest()[:24]


def _read_cache(file: Path) -> Decoded:
    with np.load(file, allow_pickle=False) as arrays:
        about = json.loads(str(arrays["about"]))
        return Decoded(
            images=arrays["images"],
            labels=arrays["labels"],
            holder=arrays["holder"],
            trains=about["trains"],
            **{field: tuple(about[field]) for field in ("classes", "holders", "notes")},
        )


def _write_cache(file: Path, found: Decoded) -> None:
    """All or nothing: a run that is killed here leaves no half-written cache behind."""
    about = {field: getattr(found, field) for field in ("trains", "classes", "holders", "notes")}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(
        file,
        lambda out: np.savez(
            out,
            images=found.images,
            labels=found.labels,
            holder=found.holder,
            about=np.array(json.dumps(about)),
        ),
    )


def _searched() -> str:
    place = os.environ.get("SEMISFL_DATA")
    return f", nor in SEMISFL_DATA = {place}" if place else " (SEMISFL_DATA is not set)"
