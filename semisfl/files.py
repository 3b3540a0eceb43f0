"""Files that are written whole or not at all, and pictures."""

import contextlib
import errno
import os
import secrets
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPORARY = ".tmp"


def write_whole(
    path: Path, content: bytes | Callable[[BinaryIO], object], *, private: bool = False
) -> None:
    """Replace ``path`` in one go: a crash or a full disk leaves the previous file as it was.

    ``content`` is what to write, or writes it to the file it is given. ``private``: there is no
    moment in which others could read it.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    try:
        with open(os.open(temporary, flags, 0o600 if private else 0o666), "wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_temporary(folder: Path) -> None:
    """Clear away what processes that were killed while writing left; nobody may be writing now."""
    for left in folder.glob(f".*{TEMPORARY}"):
        left.unlink(missing_ok=True)


def stamp(*paths: Path) -> tuple[object, ...]:
    """Differs once any of these files was written or replaced."""
    stamps: list[object] = []
    for path in paths:
        try:
            found = path.stat()
            stamps.append((found.st_mtime_ns, found.st_size, found.st_ino))
        except OSError:
            stamps.append(None)
    return tuple(stamps)


def append_whole(path: Path, data: bytes, *, private: bool = False) -> None:
    """All of ``data`` or nothing: half a line would spoil the next one too.

    ``private``: a file that is made for it can be read by nobody else.
    """
    flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY
    with open(os.open(path, flags, 0o600 if private else 0o666), "ab", buffering=0) as file:
        written = file.write(data)
        if written != len(data):
            with contextlib.suppress(OSError):
                file.truncate(file.tell() - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if private:
            os.fsync(file.fileno())


def save_picture(figure: "Figure", path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph", UserWarning)  # of scripts that the font lacks
        figure.savefig(path, dpi=120)
