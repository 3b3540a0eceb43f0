"""Summarise repeated refusals: a refused client may come back any number of times."""

import threading
import time
from collections import Counter
from collections.abc import Callable

AUDIT_LINES, AUDIT_SECONDS = 20, 60.0
"""Refusals of an identity that get their own line, per that many seconds; the others are counted."""


class Refusals:
    """Pass the first refusals of every identity on to ``tell``, and later how many more there were.

    ``tell`` is called with the peer, the identity, the reason and who states it. Any thread may call.
    """

    def __init__(self, tell: Callable[[str, str, str, str], None]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._last: dict[str, tuple[str, str, str]] = {}
        """Peer, reason and speaker of the latest refusal that was only counted, by identity."""
        self._ends = 0.0
        self._timer: threading.Timer | None = None

    def note(self, peer: str, identity: str, reason: str, by: str = "server") -> None:
        """Pass on or count one refusal."""
        with self._lock:
            now = time.monotonic()
            if now >= self._ends and self._timer is None:
                self._counts.clear()
                self._ends = now + AUDIT_SECONDS
            self._counts[identity] += 1
            if self._counts[identity] > AUDIT_LINES:
                self._last[identity] = peer, reason, by
                if self._timer is None:
                    self._timer = threading.Timer(max(0.0, self._ends - now), self.sum_up)
                    self._timer.daemon = True
                    self._timer.start()
                return
        self._tell(peer, identity, reason, by)

    def sum_up(self) -> None:
        """Pass on how many were only counted and count from 0 again; also called at the end."""
        with self._lock:
            counts, last, timer = self._counts, self._last, self._timer
            self._counts, self._last, self._timer = Counter(), {}, None
            self._ends = 0.0
        if timer is not None:
            timer.cancel()
        for identity, (peer, reason, by) in last.items():
            self._tell(
                peer,
                identity,
                f"{counts[identity] - AUDIT_LINES} more refused within {AUDIT_SECONDS:g} s have no "
                f"line of their own; the last: {reason}",
                by,
            )
