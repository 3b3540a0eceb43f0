"""Write files whole or not at all, and save pictures."""

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
    """Replace ``path`` at once: after a crash or on a full disk the previous file is still there.

    ``content`` is the bytes to write, or a function that writes to the open file. ``private``: at
    no moment can other users read it.
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
    """Delete temporary files of processes that were killed while writing; nobody may be writing now."""
    for left in folder.glob(f".*{TEMPORARY}"):
        left.unlink(missing_ok=True)


def stamp(*paths: Path) -> tuple[object, ...]:
    """Return a value that changes when one of these files is written or replaced."""
    stamps: list[object] = []
    for path in paths:
        try:
            status = path.stat()
            stamps.append((status.st_mtime_ns, status.st_size, status.st_ino))
        except OSError:
            stamps.append(None)
    return tuple(stamps)


def append_whole(path: Path, data: bytes, *, private: bool = False) -> None:
    """Append all of ``data`` or nothing: half a line would also damage the next one.

    ``private``: if the file is new, other users cannot read it.
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
        warnings.filterwarnings("ignore", "Glyph", UserWarning)  # letters that the font lacks
        figure.savefig(path, dpi=120)
