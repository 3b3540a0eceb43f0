"""Give every run its own log, also if several run at once, each in a thread.

What is logged before a run's directory exists is kept for its log: images left out, layers that are new.
"""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from pathlib import Path

_LOGGER = logging.getLogger("semisfl")
_logs: dict[int, "_RunLog"] = {}
"""The log of each thread that is busy with a run."""


class _RunLog(MemoryHandler):
    """Handle the records of one run's thread, and of threads that have no run: keep them until there is a file."""

    def __init__(self) -> None:
        super().__init__(capacity=0)  # once there is a file, no record waits for others

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is of this run: its thread has no other one."""
        return _logs.get(record.thread or 0, self) is self


class _LogFile(logging.FileHandler):
    """A log file that drops the lines a full disk refuses; they were shown on the console too."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8")
        form = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%SZ")
        form.converter = time.gmtime
        self.setFormatter(form)

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


@contextmanager
def collected() -> Iterator[_RunLog]:
    """Collect what is logged in this thread, until a run that starts inside the block takes it.

    Inside another such block it gives the log of that. Lines of level INFO and above are logged from then on.
    """
    thread = threading.get_ident()
    if thread in _logs:
        yield _logs[thread]
        return
    if not _LOGGER.isEnabledFor(logging.INFO):
        _LOGGER.setLevel(logging.INFO)
    log = _logs[thread] = _RunLog()
    # Python shows warnings of a program without a log on stderr, but not if there is a handler such as ours.
    usual = None if _LOGGER.hasHandlers() else logging.lastResort
    handlers = [log, usual] if usual is not None else [log]
    for handler in handlers:
        _LOGGER.addHandler(handler)
    try:
        yield log
    finally:
        for handler in handlers:
            _LOGGER.removeHandler(handler)
        del _logs[thread]


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Write what was collected to the file ``path``, and what is logged inside the block, after what is there."""
    with collected() as log:
        before, file = log.target, _LogFile(path)
        log.setTarget(file)
        log.flush()
        try:
            yield
        finally:
            log.setTarget(before)
            file.close()
