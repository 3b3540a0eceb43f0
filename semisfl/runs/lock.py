"""Lock a run's directory, so that one process at a time writes to it."""

import contextlib
import fcntl
import os
import platform
from pathlib import Path

EXIT_CODE = 3
"""Exit code when the run directory is locked; wrapper scripts check it."""


class Taken(ValueError):
    """Raised when the directory for a run is locked, or already holds a run."""


def take(folder: Path) -> int:
    """Return a handle that holds the lock until it is closed or this process ends.

    Raises ValueError for a folder that holds a link or a pipe: a run's files are written in place, and in the folder
    of a stranger a link could lead to any file of this user, and a pipe would keep its reader waiting for ever.
    """
    for entry in folder.iterdir():
        if entry.is_symlink():
            raise ValueError(
                f"{entry} is a link: a run would write to the file it leads to; put a copy of that in its place"
            )
        if entry.is_fifo():
            raise ValueError(f"{entry} is a pipe, which no run makes; remove it")
    path = folder / "run.lock"
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError as error:
        raise ValueError(
            f"cannot write to {folder}: {error.strerror}; continue the run as the user who began it, "
            "or make the directory and its files yours with chown"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise Taken(
            f"{folder} is in use by {path.read_text().strip() or 'another process'}; "
            "stop it first, or choose another directory"
        ) from error
    # The name of the holder is for the error above; on a full disk the lock works without it.
    with contextlib.suppress(OSError):
        os.truncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {platform.node()}\n".encode())
    return handle
