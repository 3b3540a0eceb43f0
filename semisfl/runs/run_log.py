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
"""Most lines that are kept until there is a file."""

_LOGGER = logging.getLogger("semisfl")
_logs: dict[int, "_RunLog"] = {}
"""The log of each thread that is busy with a run."""


class _RunLog(logging.Handler):
    """Handle the records of one run's thread, and of threads that have no run."""

    def __init__(self) -> None:
        super().__init__()
        self.early: deque[logging.LogRecord] = deque(maxlen=MOST)
        self.file: _LogFile | None = None
        """None: lines are kept in ``early``."""

    def emit(self, record: logging.LogRecord) -> None:
        if _logs.get(record.thread or 0, self) is not self:
            return
        if self.file is not None:
            self.file.emit(record)
        else:
            self.early.append(record)
        # Python shows warnings of a program without a log on stderr, but not if there is a handler such as this.
        others = [*_LOGGER.handlers, *logging.getLogger().handlers]
        first = others[0] is self or record.thread in _logs
        shown, alone = logging.lastResort, all(isinstance(one, _RunLog) for one in others)
        if first and alone and shown is not None and record.levelno >= shown.level:
            shown.handle(record)


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
    _LOGGER.addHandler(log)
    try:
        yield log
    finally:
        _LOGGER.removeHandler(log)
        del _logs[thread]


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Write what was collected to the file ``path``, and what is logged inside the block, after what is there."""
    with collected() as log:
        before, log.file = log.file, _LogFile(path)
        if before is None:  # else a callback of one run trains another
            while log.early:
                log.file.emit(log.early.popleft())
        try:
            yield
        finally:
            log.file.close()
            log.file = before
