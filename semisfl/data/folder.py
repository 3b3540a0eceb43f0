"""Folders of images.

Two forms, told apart by whether the root has a ``train`` or ``test`` folder:

- classes: ``train/<class>/*`` and ``test/<class>/*``, and beside them either ``unlabeled/*``
  (images of unknown label, to be dealt to clients), or ``unlabeled/<client>/*`` or
  ``clients/<client>/*`` (the folders say who holds what);
- clients: ``<client>/*``, every label unknown, no test images; images straight in the root make
  one client.

Class and client folders may hold folders of their own. Images are regular files told by their
suffix; hidden files are passed over, other files are counted in a note. Links are followed here.
A device (`semisfl join`) has no forms: it takes `everything` below its folder, and no image that a
link leads to outside of it.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from semisfl.data.decode import Rows, Source, open_image

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".ppm", ".pgm"}


def source(root: Path) -> Source:
    """The images under a folder; which form it has is decided here, before any is read."""
    folders = {folder.name for folder in _folders(root)}
    listing = _Listing(root)
    if folders & {"train", "test"}:
        classes = _by_class(listing, folders)
    else:
        classes = ()
        _by_client(listing, root)
    if not listing.files:
        raise ValueError(f"{root} holds no images ({_suffixes()})")
    return Source(root.name, tuple(listing.files), lambda: listing.rows(classes))


def everything(root: Path) -> Source:
    """Every image below a folder, whatever folders they lie in: what a device holds."""
    listing = _Listing(root)
    listing.add(root)
    return Source(root.name, tuple(listing.files), lambda: listing.rows(()))


class _Listing:
    """Image files as they are found, with what their folders say of them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: list[Path] = []
        self.labels: list[int] = []
        self.holder: list[int] = []
        self.holders: list[str] = []
        self.trains = 0
        self.others: list[Path] = []

    def add(self, folder: Path, *, label: int = -1, test: bool = False, holder: int = -1) -> None:
        found = list(_files(folder))
        # Regular files only: to read from a pipe or a device may take for ever.
        images = [file for file in found if file.suffix.lower() in SUFFIXES and file.is_file()]
        if not images:
            raise ValueError(f"{folder} holds no images ({_suffixes()}); fill or remove it")
        self.files += images
        self.others += sorted(set(found) - set(images))
        self.labels += [label] * len(images)
        self.holder += [holder] * len(images)
        self.trains += 0 if test else len(images)

    def add_clients(self, folders: list[Path]) -> None:
        for folder in folders:
            self.holders.append(folder.name)
            self.add(folder, holder=len(self.holders) - 1)

    def rows(self, classes: tuple[str, ...]) -> Rows:
        notes = []
        if self.others:
            first = ", ".join(str(file.relative_to(self.root)) for file in self.others[:5])
            notes.append(f"{len(self.others)} files are no images and were passed over: {first}")
        return Rows(
            names=[file.relative_to(self.root).as_posix() for file in self.files],
            open=lambda row: open_image(self.files[row]),
            labels=np.array(self.labels, np.int64),
            trains=self.trains,
            classes=classes,
            holders=tuple(self.holders),
            holder=np.array(self.holder, np.int64),
            notes=tuple(notes),
        )


def _by_class(listing: _Listing, folders: set[str]) -> tuple[str, ...]:
    root = listing.root
    for name in ("train", "test"):
        if name not in folders:
            raise ValueError(f"{root} has no folder {name!r}; it needs train/ and test/ by class")
    classes = [folder.name for folder in _folders(root / "train")]
    if len(classes) < 2:
        raise ValueError(
            f"{root / 'train'} has {len(classes)} class folders ({', '.join(classes) or 'none'}); "
            "at least 2 are needed, one folder per class"
        )
    for label, name in enumerate(classes):
        listing.add(root / "train" / name, label=label)
    _unlabeled(listing, folders)
    tested = _folders(root / "test")
    if not tested:
        raise ValueError(f"{root / 'test'} has no class folders; put test images in one a class")
    for folder in tested:
        if folder.name not in classes:
            raise ValueError(
                f"{folder} is a class without training images; add train/{folder.name}"
            )
        listing.add(folder, label=classes.index(folder.name), test=True)
    return tuple(classes)


def _unlabeled(listing: _Listing, folders: set[str]) -> None:
    found = sorted(folders & {"unlabeled", "clients"})
    if len(found) == 2:
        raise ValueError(f"{listing.root} has both clients/ and unlabeled/; keep one of them")
    if found == ["unlabeled"] and not _folders(listing.root / "unlabeled"):
        listing.add(listing.root / "unlabeled")
    elif found:
        _by_client(listing, listing.root / found[0])


def _by_client(listing: _Listing, parent: Path) -> None:
    folders = _folders(parent)
    loose = [file for file in parent.iterdir() if file.suffix.lower() in SUFFIXES]
    if loose and folders:
        raise ValueError(
            f"{parent} mixes images ({loose[0].name}) and folders ({folders[0].name}); "
            "put every image into a client's folder"
        )
    listing.add_clients(folders or [parent])


def _folders(parent: Path) -> list[Path]:
    return sorted(
        entry for entry in parent.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )


def _files(folder: Path) -> Iterator[Path]:
    """Every file below a folder that is not hidden, in an order that any machine repeats."""
    for place, below, names in os.walk(folder):
        below[:] = sorted(name for name in below if not name.startswith("."))
        yield from (Path(place, name) for name in sorted(names) if not name.startswith("."))


def _suffixes() -> str:
    return f"looked for {', '.join(sorted(SUFFIXES))}"
