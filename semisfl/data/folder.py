"""Read folders of images.

There are two forms. A root with a ``train`` or ``test`` folder has the first:

- classes: ``train/<class>/*`` and ``test/<class>/*``. Images without a label may lie beside them: in
  ``unlabeled/*``, to be divided among clients, or in ``unlabeled/<client>/*`` or ``clients/<client>/*``,
  where the folders say who holds what.
- clients: ``<client>/*``, no labels and no test images. Images directly in the root make one client. Where labelled
  images are needed, these folders are classes (`semisfl.data.sources.with_classes`).

Class and client folders may hold folders of their own. Images are regular files with a known suffix. Files
and folders whose names begin with a dot are skipped; all other files that are not used are counted in a
note. Links are followed. A device (`semisfl join`) takes `all_images` below its folder instead.
"""

import contextlib
import logging
import os
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from semisfl.data.decode import Listing, Source, open_image
from semisfl.settings.counts import plural

log = logging.getLogger(__name__)

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff"}

SMALL = 64
"""The largest side in pixels of images that are small: photographs of a camera are larger."""


def has_classes(root: Path) -> bool:
    """Return whether a folder has the form ``train/<class>/*``."""
    return (root / "train").is_dir() and bool(folders_in(root / "train"))


def source(root: Path) -> Source:
    """Return the images under a folder; its form is decided here, before any image is read.

    Raises ValueError if the folder, a class or a client has no images, or a class has test images only.
    """
    images = _Images(root)
    folders = {folder.name for folder in folders_in(root)}
    classes: tuple[str, ...] = ()
    if folders & {"train", "test"}:
        classes = images.add_classes(folders)
    else:
        images.add_clients(root)
    return images.source(classes)


def all_images(root: Path) -> Source:
    """Return every image below a folder, in whatever subfolders: what a device holds.

    Raises ValueError if there is none.
    """
    images = _Images(root)
    images.add(root)
    return images.source(())


class _Images:
    """Image files with the label, split and client that their folders give them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: list[Path] = []
        self.labels: list[int] = []
        self.holder: list[int] = []
        self.holders: list[str] = []
        self.trains = 0

    def add(self, folder: Path, *, label: int = -1, test: bool = False, holder: int = -1) -> None:
        """Add the images below a folder, which all have this label, split and client."""
        images = list(images_below(folder))
        if not images:
            suffixes = ", ".join(sorted(SUFFIXES))
            raise ValueError(f"{folder} holds no images (looked for {suffixes}); fill or remove it")
        self.files += images
        self.labels += [label] * len(images)
        self.holder += [holder] * len(images)
        self.trains += 0 if test else len(images)

    def add_clients(self, parent: Path) -> None:
        """Add one client per folder in ``parent``; if there is none, ``parent`` is one client."""
        for folder in folders_in(parent) or [parent]:
            self.holders.append(folder.name)
            self.add(folder, holder=len(self.holders) - 1)

    def add_classes(self, folders: set[str]) -> tuple[str, ...]:
        """Add class folders, and images without a label beside them; return the names of the classes."""
        root = self.root
        for name in ("train", "test"):
            if name not in folders:
                raise ValueError(
                    f"{root} has no folder {name!r}; it needs train/ and test/ by class"
                )
        trained = folders_in(root / "train")
        classes = sorted({class_name(folder.name) for folder in trained})
        for folder in trained:
            self.add(folder, label=classes.index(class_name(folder.name)))
        for name in ("clients", "unlabeled"):
            if name == "unlabeled" and name in folders and not folders_in(root / name):
                self.add(root / name)
            elif name in folders:
                self.add_clients(root / name)
        for folder in folders_in(root / "test"):
            if class_name(folder.name) not in classes:
                raise ValueError(
                    f"{folder} is a class without training images; add train/{folder.name}"
                )
            self.add(folder, label=classes.index(class_name(folder.name)), test=True)
        return tuple(classes)

    def source(self, classes: tuple[str, ...]) -> Source:
        """Return the files as a source. Files that are not used are looked for when it is listed."""
        name = Path(os.path.abspath(self.root)).name
        return Source(name, tuple(self.files), lambda: self._listing(classes))

    def _listing(self, classes: tuple[str, ...]) -> Listing:
        used = set(self.files)
        notes: tuple[str, ...] = ()
        if others := [file for file in files_below(self.root) if file not in used]:
            first = ", ".join(str(file.relative_to(self.root)) for file in others[:5])
            notes = (
                f"skipped {plural(len(others), 'file')} (not an image, or in no folder of a class or client): "
                f"{first}" + ", ..." * (len(others) > 5),
            )
        return Listing(
            names=[file.relative_to(self.root).as_posix() for file in self.files],
            open=lambda place: open_image(self.files[place]),
            labels=np.array(self.labels, np.int64),
            trains=self.trains,
            classes=classes,
            holders=tuple(self.holders),
            holder=np.array(self.holder, np.int64),
            notes=notes,
        )


def class_name(text: str) -> str:
    """Return a class's name in Unicode's composed form.

    Names that look alike are then one name: an archive made on a Mac has two code points for one é.
    """
    return unicodedata.normalize("NFC", text)


def folders_in(parent: Path) -> list[Path]:
    """Return the folders in a folder in the order of their names, without those that begin with a dot."""
    return sorted(
        entry for entry in parent.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )


def holds_photographs(root: Path) -> bool:
    """Return whether the first image below a folder is a colour image larger than `SMALL` pixels each way."""
    with contextlib.suppress(StopIteration, OSError, ValueError):  # no image, or a broken one
        image = open_image(next(images_below(root.resolve(strict=True))))
        return min(image.size) > SMALL and len(image.getbands()) > 2
    return False


def images_below(folder: Path) -> Iterator[Path]:
    """Yield the image files below a folder; a pipe or a device is none, as reading it may never end."""
    return (
        file for file in files_below(folder) if file.suffix.lower() in SUFFIXES and file.is_file()
    )


def files_below(folder: Path) -> Iterator[Path]:
    """Yield every file below a folder, in the same order on every machine; names with a dot are skipped.

    Links are followed, and each folder is read once. A warning names folders that cannot be read.
    """
    seen = set(map(str, folder.resolve().parents))  # a link that leads up would mix classes
    for place, below, names in os.walk(folder, onerror=_left_out, followlinks=True):
        if (real := os.path.realpath(place)) in seen:
            below.clear()
            continue
        seen.add(real)
        below[:] = sorted(name for name in below if not name.startswith("."))
        yield from (Path(place, name) for name in sorted(names) if not name.startswith("."))


def _left_out(error: OSError) -> None:
    log.warning("%s cannot be read and is left out: %s", error.filename, error.strerror)
