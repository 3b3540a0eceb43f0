"""Keep what is logged before a run's directory exists for the run's log: images left out, layers that are new."""

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

MOST = 1000
"""Lines that are kept: strangers can make a server log while it starts."""


class _Early(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: deque[logging.LogRecord] = deque(maxlen=MOST)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        others = [*logging.getLogger("semisfl").handlers, *logging.getLogger().handlers]
        if others == [self] and logging.lastResort is not None:
            # Without this handler, a program that configures no logging would get the warnings on stderr.
            logging.lastResort.handle(record)


@contextmanager
def collected() -> Iterator[None]:
    """Collect what is logged, until a run that starts inside the block takes it."""
    root = logging.getLogger("semisfl")
    if any(isinstance(one, _Early) for one in root.handlers):
        yield
        return
    early = _Early()
    root.addHandler(early)
    try:
        yield
    finally:
        root.removeHandler(early)


def take() -> list[logging.LogRecord]:
    """Return what was collected, and collect no more."""
    root = logging.getLogger("semisfl")
    taken: list[logging.LogRecord] = []
    for early in [one for one in root.handlers if isinstance(one, _Early)]:
        root.removeHandler(early)
        taken += early.records
    return taken
