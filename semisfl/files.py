"""Write files whole or not at all, read small JSON files, and write times and texts of other machines.

A run may be killed and a disk may be full at any moment: no file of a run is ever half written.
"""

import contextlib
import errno
import json
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

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
    except OSError as error:
        error.filename = str(path)  # its own is the temporary file, or none
        del error.filename2  # None would be part of the message
        raise
    finally:
        # A read-only disk refuses it, even if there is no such file.
        with contextlib.suppress(OSError):
            temporary.unlink()


def cache_folder() -> Path:
    """Return the folder for what can be made or downloaded again: ``$SEMISFL_CACHE``, else ``~/.cache/semisfl``."""
    place = os.environ.get("SEMISFL_CACHE")
    return Path(place) if place else Path.home() / ".cache" / "semisfl"


def printable(text: str) -> str:
    """Return a text from elsewhere without control characters, which could steer a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def read_json(path: Path) -> dict[str, Any]:
    """Return the values of a small JSON file; empty if it is missing, damaged or holds no object."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


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


def timestamp(seconds: float | None = None) -> str:
    """Return now, or ``seconds`` after the epoch, as files and logs have it: in UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


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


def save_picture(figure: "Figure", path: Path, dpi: int = 120, **how: Any) -> None:
    """Draw ``figure`` into ``path``, whose suffix is the format; whole or not at all. ``how``: as for `savefig`."""
    form = path.suffix.removeprefix(".")
    write_whole(path, lambda file: figure.savefig(file, dpi=dpi, format=form, **how))
