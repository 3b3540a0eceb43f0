"""Refusals that repeat, told in few lines: whoever is refused may come back any number of times."""

import threading
import time
from collections import Counter
from collections.abc import Callable

AUDIT_LINES, AUDIT_SECONDS = 20, 60.0
"""So many refusals of an identity leave a line of their own in so much time; the others are counted."""


class Refusals:
    """Hands the first refusals of every identity on to ``tell``, and now and then how many more
    there were. ``tell`` is given the peer, the identity and the reason. Any thread may call."""

    def __init__(self, tell: Callable[[str, str, str], None]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._last: dict[str, tuple[str, str]] = {}
        """Of identities with refusals that were not told: peer and reason of the latest."""
        self._ends = 0.0
        self._timer: threading.Timer | None = None

    def note(self, peer: str, identity: str, reason: str) -> None:
        """One more refusal."""
        with self._lock:
            now = time.monotonic()
            if now >= self._ends and self._timer is None:
                self._counts.clear()
                self._ends = now + AUDIT_SECONDS
            self._counts[identity] += 1
            if self._counts[identity] > AUDIT_LINES:
                self._last[identity] = peer, reason
                if self._timer is None:
                    self._timer = threading.Timer(max(0.0, self._ends - now), self.sum_up)
                    self._timer.daemon = True
                    self._timer.start()
                return
        self._tell(peer, identity, reason)

    def sum_up(self) -> None:
        """Tell what was only counted, and count from 0 again; to be called at the end, too."""
        with self._lock:
            counts, last, timer = self._counts, self._last, self._timer
            self._counts, self._last, self._timer = Counter(), {}, None
            self._ends = 0.0
        if timer is not None:
            timer.cancel()
        for identity, (peer, reason) in last.items():
            self._tell(
                peer,
                identity,
                f"{counts[identity] - AUDIT_LINES} more refused within {AUDIT_SECONDS:g} s have no "
                f"line of their own; the last: {reason}",
            )
