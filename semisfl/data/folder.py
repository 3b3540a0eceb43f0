"""Read folders of images.

There are two forms. A root with a ``train`` or ``test`` folder has the first:

- classes: ``train/<class>/*`` and ``test/<class>/*``. Images without a label may lie beside them: in
  ``unlabeled/*``, to be divided among clients, or in ``unlabeled/<client>/*`` or ``clients/<client>/*``,
  where the folders say who holds what.
- clients: ``<client>/*``, no labels and no test images. Images directly in the root make one client.

Class and client folders may hold folders of their own. Images are regular files with a known
suffix; hidden files and folders are skipped, other files and hidden classes and clients are counted in a note.
Links are followed. A device (`semisfl join`) takes `everything` below its folder instead, and follows no link out of it.
"""

import logging
import os
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from semisfl.data.decode import Listing, Source, open_image
from semisfl.files import is_utf8
from semisfl.settings.counts import counted

log = logging.getLogger(__name__)

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff"}
SYSTEM = {"__MACOSX", "@eaDir"}
"""Folders that unpacking an archive of a Mac and some network drives put beside images."""


def has_classes(root: Path) -> bool:
    """Return whether a folder has the form ``train/<class>/*``."""
    return (root / "train").is_dir() and bool(folders_in(root / "train"))


def source(root: Path) -> Source:
    """Return the images under a folder. The form is decided here, before any image is read."""
    folders = {folder.name for folder in folders_in(root)}
    collected = _Collected(root)
    if folders & {"train", "test"}:
        classes = _by_class(collected, folders)
    else:
        classes = ()
        _by_client(collected, root)
    if not collected.files:
        raise ValueError(f"{root} holds no images ({_suffixes()}); name another folder")
    for name in (*classes, *collected.holders):
        if not is_utf8(name):
            encoding = sys.getfilesystemencoding()
            fix = "rename it" if encoding == "utf-8" else "set PYTHONUTF8=1, or rename it"
            raise ValueError(
                f"the name of the folder {name!a} in {root} is not {encoding.upper()}; {fix}"
            )
    return Source(_name(root), tuple(collected.files), lambda: collected.listing(classes))


def everything(root: Path) -> Source:
    """Return every image below a folder, in whatever subfolders: what a device holds."""
    collected = _Collected(root)
    collected.add(root, follow_links=False)
    return Source(_name(root), tuple(collected.files), lambda: collected.listing(()))


def check_images(root: Path) -> None:
    """Raise `ValueError` if no image lies below a folder; log nothing else of what is left out."""
    files = files_below(root, follow_links=False, quiet=True)
    if not any(_is_image(file) and _lies_in(root, file) for file in files):
        everything(root)


def _name(root: Path) -> str:
    """Return the folder's own name, also for ``.`` and ``..``."""
    return root.resolve().name if root.name in ("", "..") else root.name


def inside(root: Path, files: Sequence[Path]) -> list[Path]:
    """Return the files that lie in ``root``: what a device may use.

    Links that lead out of it are not followed: anyone who can put a link into the folder could
    otherwise make the device use private images elsewhere.
    """
    kept = [file for file in files if _lies_in(root, file)]
    if outside := len(files) - len(kept):
        log.warning("not followed, as they lead out of %s: %s", root, counted(outside, "link"))
    return kept


def _lies_in(root: Path, file: Path) -> bool:
    """Return whether a file does, wherever links lead; `resolve` would raise an error for a loop of links."""
    return Path(os.path.realpath(file)).is_relative_to(os.path.realpath(root))


class _Collected:
    """Image files with the label, split and holder that their folders give them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: list[Path] = []
        self.labels: list[int] = []
        self.holder: list[int] = []
        self.holders: list[str] = []
        self.trains = 0
        self.others: list[Path] = []
        self.loose: list[Path] = []
        """Images that lie beside class folders, so that no class is known of them."""
        self.hidden: list[Path] = []
        """Folders of images that would be classes or clients if their names began with another letter."""
        self.unused: list[Path] = []
        """Folders beside ``train``, ``test`` and the clients': ``val``, ``unlabelled``."""

    def add(
        self,
        folder: Path,
        *,
        label: int = -1,
        test: bool = False,
        holder: int = -1,
        follow_links: bool = True,
    ) -> None:
        files = list(files_below(folder, follow_links=follow_links))
        images = [file for file in files if _is_image(file)]
        if not follow_links:
            images = inside(folder, images)
        if not images:
            raise ValueError(f"{folder} holds no images ({_suffixes()}); fill or remove it")
        self.files += images
        self.others += [file for file in files if not _is_image(file)]
        self.labels += [label] * len(images)
        self.holder += [holder] * len(images)
        self.trains += 0 if test else len(images)

    def add_clients(self, folders: list[Path]) -> None:
        for folder in folders:
            self.holders.append(folder.name)
            self.add(folder, holder=len(self.holders) - 1)

    def listing(self, classes: tuple[str, ...]) -> Listing:
        notes = []
        elsewhere = [
            file for folder in self.unused for file in files_below(folder) if _is_image(file)
        ]
        for files, noun, where in (
            (self.others, "file", "other than images"),
            (self.loose, "image", "in no class folder"),
            (self.hidden, "hidden folder", "of images"),
            (elsewhere, "image", "outside train, test, unlabeled and clients"),
        ):
            if files:
                first = ", ".join(str(file.relative_to(self.root)) for file in files[:5])
                notes.append(f"skipped {counted(len(files), noun)} {where}: {first}")
        return Listing(
            names=[file.relative_to(self.root).as_posix() for file in self.files],
            open=lambda place: open_image(self.files[place]),
            labels=np.array(self.labels, np.int64),
            trains=self.trains,
            classes=classes,
            holders=tuple(self.holders),
            holder=np.array(self.holder, np.int64),
            notes=tuple(notes),
        )


def _by_class(collected: _Collected, folders: set[str]) -> tuple[str, ...]:
    root = collected.root
    for name in ("train", "test"):
        if name not in folders:
            raise ValueError(f"{root} has no folder {name!r}; it needs train/ and test/ by class")
    trained = folders_in(root / "train")
    classes = sorted({class_name(folder.name) for folder in trained})
    if len(classes) < 2:
        raise ValueError(
            f"{root / 'train'} has {counted(len(classes), 'class folder')} ({', '.join(classes) or 'none'}); "
            "at least 2 are needed, one folder per class"
        )
    for folder in trained:
        collected.add(folder, label=classes.index(class_name(folder.name)))
    _unlabeled(collected, folders)
    tested = folders_in(root / "test")
    if not tested:
        raise ValueError(
            f"{root / 'test'} has no class folders; put test images into one folder per class"
        )
    for folder in tested:
        if class_name(folder.name) not in classes:
            raise ValueError(
                f"{folder} is a class without training images; add train/{folder.name}"
            )
        collected.add(folder, label=classes.index(class_name(folder.name)), test=True)
    collected.loose = [*_loose(root / "train"), *_loose(root / "test")]
    collected.hidden += [*hidden_folders(root / "train"), *hidden_folders(root / "test")]
    used = {"train", "test", "unlabeled", "clients"}
    collected.unused = [root / name for name in sorted(folders - used)]
    return tuple(classes)


def _unlabeled(collected: _Collected, folders: set[str]) -> None:
    names = sorted(folders & {"unlabeled", "clients"})
    if len(names) == 2:
        raise ValueError(f"{collected.root} has both clients/ and unlabeled/; keep one of them")
    if names == ["unlabeled"] and not folders_in(collected.root / "unlabeled"):
        collected.add(collected.root / "unlabeled")
    elif names:
        _by_client(collected, collected.root / names[0])


def _by_client(collected: _Collected, parent: Path) -> None:
    folders = folders_in(parent)
    collected.hidden += hidden_folders(parent)
    if folders and (loose := _loose(parent)):
        raise ValueError(
            f"{parent} mixes images ({loose[0].name}) and folders ({folders[0].name}); "
            "put every image into a client's folder"
        )
    collected.add_clients(folders or [parent])


def class_name(text: str) -> str:
    """Return a class's name in the composed form: names that look alike, such as é in one or two code points, are one."""
    return unicodedata.normalize("NFC", text)


def folders_in(parent: Path) -> list[Path]:
    """Return the folders in a folder that are not hidden, in order."""
    return sorted(entry for entry in parent.iterdir() if entry.is_dir() and not _hidden(entry.name))


def hidden_folders(parent: Path) -> list[Path]:
    """Return the folders of images in a folder that begin with a dot, in order."""
    dotted = sorted(entry for entry in parent.glob(".*") if entry.is_dir())
    return [folder for folder in dotted if any(map(_is_image, files_below(folder, quiet=True)))]


def _hidden(name: str) -> bool:
    """Return whether a file or folder is hidden, or a folder that a system puts beside its user's."""
    return name.startswith(".") or name in SYSTEM


def _loose(parent: Path) -> list[Path]:
    """Return the images directly in a folder."""
    return [file for file in sorted(parent.iterdir()) if _is_image(file) and not _hidden(file.name)]


def _is_image(file: Path) -> bool:
    """Return whether a regular file is named as an image; to read a pipe or a device may never end."""
    return file.suffix.lower() in SUFFIXES and file.is_file()


def files_below(folder: Path, *, follow_links: bool = True, quiet: bool = False) -> Iterator[Path]:
    """Yield every file below a folder that is not hidden, in the same order on every machine.

    Without ``follow_links``, folders behind links are left out; else each folder is read once.
    A warning names what is left out, unless ``quiet``.
    """
    seen = set(map(str, folder.resolve().parents))  # a link that leads up would mix classes
    onerror = None if quiet else _left_out
    for place, below, names in os.walk(folder, onerror=onerror, followlinks=follow_links):
        if (real := os.path.realpath(place)) in seen:
            below.clear()
            continue
        seen.add(real)
        below[:] = sorted(name for name in below if not _hidden(name))
        links = [] if follow_links else [name for name in below if Path(place, name).is_symlink()]
        if links and not quiet:
            log.warning("not followed in %s: %s to folders", place, counted(len(links), "link"))
        yield from (Path(place, name) for name in sorted(names) if not _hidden(name))


def _left_out(error: OSError) -> None:
    log.warning("%s cannot be read and is left out: %s", error.filename, error.strerror)


def _suffixes() -> str:
    return f"looked for {', '.join(sorted(SUFFIXES))}"
