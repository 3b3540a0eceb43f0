"""Give every run its own log, also if several run at once, each in a thread.

What is logged before a run's directory exists is kept for its log: images left out, layers that are new.
"""

import contextlib
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MOST = 1000
"""Most lines that are kept, because strangers can make a server log while it starts."""

_LOGGER = logging.getLogger("semisfl")
_of_thread: dict[int, "_OfOneRun"] = {}
"""The log of each thread that is busy with a run."""
_levels: list[int] = []
"""The logger's level before the first of the logs that are being written; one entry per log."""
_lock = threading.Lock()


class _OfOneRun(logging.Handler):
    """Handle the records of the thread that it is `attached` in, and of threads that have no run."""

    @contextmanager
    def attached(self) -> Iterator[None]:
        thread = threading.get_ident()
        before = _of_thread.get(thread)
        _of_thread[thread] = self
        _LOGGER.addHandler(self)
        try:
            yield
        finally:
            _LOGGER.removeHandler(self)
            del _of_thread[thread]
            if before is not None:
                _of_thread[thread] = before

    def handle(self, record: logging.LogRecord) -> bool:
        if _of_thread.get(record.thread or 0, self) is not self:
            return False
        self._show(record)
        return bool(super().handle(record))

    def _show(self, record: logging.LogRecord) -> None:
        """Show the record on stderr if the program has configured no log, as Python does without our handlers."""
        handlers = [*_LOGGER.handlers, *logging.getLogger().handlers]
        shown = logging.lastResort
        if shown is None or record.levelno < shown.level:
            return
        if handlers[0] is not self and record.thread not in _of_thread:
            return  # the first one shows it
        if all(isinstance(one, _OfOneRun) for one in handlers):
            shown.handle(record)


class _Early(_OfOneRun):
    def __init__(self) -> None:
        super().__init__()
        self.records: deque[logging.LogRecord] = deque(maxlen=MOST)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


class _LogFile(_OfOneRun, logging.FileHandler):
    """A log file that drops the lines a full disk refuses; they were shown on the console too."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


@contextmanager
def collected() -> Iterator[None]:
    """Collect what is logged, until a run that starts inside the block takes it."""
    if isinstance(_of_thread.get(threading.get_ident()), _Early):
        yield
        return
    with _Early().attached():
        yield


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Write what was collected to a file, and what is logged inside the block."""
    file = _LogFile(path, encoding="utf-8")
    formatter = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%SZ")
    formatter.converter = time.gmtime
    file.setFormatter(formatter)
    early = _of_thread.get(threading.get_ident())
    if isinstance(early, _Early):
        _LOGGER.removeHandler(early)
        for record in early.records:
            file.emit(record)
        early.records.clear()
    with _lock:
        _levels.append(_levels[0] if _levels else _LOGGER.level)
        if not _LOGGER.isEnabledFor(logging.INFO):
            _LOGGER.setLevel(logging.INFO)
    try:
        with file.attached():
            yield
    finally:
        file.close()
        with _lock:
            level = _levels.pop()
            if not _levels:
                _LOGGER.setLevel(level)
