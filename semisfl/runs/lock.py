"""Lock a run's directory, so that one process at a time writes to it. Loads no torch."""

import contextlib
import fcntl
import os
import platform
from pathlib import Path

EXIT_CODE = 3
"""Exit code when the run directory is locked; wrapper scripts check it."""


class Taken(ValueError):
    """Raised when the directory for a run is locked, or already holds a run."""


def take(folder: Path, name: str = "run.lock") -> int:
    """Return a handle that holds the lock of ``folder`` until it is closed or this process ends.

    ``name`` is the lock's file. Raises `Taken` if another process has it.
    """
    file = folder / name
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise Taken(
            f"{folder} is in use by {file.read_text().strip() or 'another process'}; "
            "stop it first, or choose another directory"
        ) from error
    # The name of the holder is for the error above; on a full disk the lock works without it.
    with contextlib.suppress(OSError):
        os.truncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {platform.node()}\n".encode())
    return handle
