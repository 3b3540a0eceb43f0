"""Keep what a server says short, printable and rare in a device's log."""

import logging
import threading
import time
from collections import Counter

from semisfl.files import printable

LONGEST = 280
"""Characters of a line."""
LINES, SECONDS = 60, 60.0
"""Lines from one place of the program in so many seconds; further ones are counted."""


def plain(text: str, longest: int = LONGEST) -> str:
    """Return ``text`` in one line without control characters, of at most ``longest`` characters.

    A longer text loses its middle: its end says what to do.
    """
    if len(text) > longest:
        end = longest // 3
        text = text[: longest - end - 1] + "…" + text[-end:]
    return printable(" ".join(text.split()))


class Brief(logging.Filter):
    """Shorten every record of a logger, and drop records that come too often."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._counts: Counter[int] = Counter()
        self._since = time.monotonic()

    def filter(self, record: logging.LogRecord) -> bool:
        with self._lock:
            left_out = 0
            if (now := time.monotonic()) - self._since >= SECONDS:
                left_out = sum(max(0, count - LINES) for count in self._counts.values())
                self._counts.clear()
                self._since = now
            self._counts[record.lineno] += 1
            if self._counts[record.lineno] > LINES:
                return False
        record.msg, record.args = plain(record.getMessage()), None
        if left_out:
            record.msg += f" ({left_out} more lines were left out)"
        return True


def brief_logger(name: str) -> logging.Logger:
    """Return the logger called ``name``, with lines that are short, printable and limited in rate."""
    log = logging.getLogger(name)
    if not any(isinstance(one, Brief) for one in log.filters):
        log.addFilter(Brief())
    return log
