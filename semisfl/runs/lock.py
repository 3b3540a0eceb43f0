"""Whose a run's directory is: that of one process at a time."""

import contextlib
import fcntl
import os
import platform
from pathlib import Path

EXIT_CODE = 3
"""Of a command that found its run's directory taken; who starts several commands reads it."""


class Taken(ValueError):
    """Another process works, or has worked, where a run was to be."""


def take(folder: Path) -> int:
    """A handle; nobody else gets one until it is closed or this process ends, however it does."""
    path = folder / "run.lock"
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise Taken(
            f"{folder} is in use by {path.read_text().strip() or 'another process'}; "
            "stop it first, or choose another directory"
        ) from error
    # Who holds it is for the line above; on a full disk the lock holds without.
    with contextlib.suppress(OSError):
        os.truncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {platform.node()}\n".encode())
    return handle
