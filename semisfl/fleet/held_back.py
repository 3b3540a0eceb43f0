"""Collect which clients were held back in a round, and why: for log, metrics and audit lines."""

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)


def _log(client: int, why: str) -> None:
    log.info("client %d is held back: %s", client, why)


class HeldBack:
    """Which clients counted for less in the current round, with the reasons.

    ``tell`` gets each client and reason at once: it writes log and audit lines.
    """

    def __init__(self, tell: Callable[[int, str], None] = _log) -> None:
        self._tell = tell
        self._reasons: dict[int, list[str]] = {}

    def add(self, client: int, why: str) -> None:
        """Note that ``client`` was held back, and pass the reason on at once."""
        self.note(client, why)
        self._tell(client, why)

    def note(self, client: int, why: str) -> None:
        """Do the same as `add` without logging."""
        self._reasons.setdefault(client, []).append(why)

    def take(self) -> dict[str, str] | None:
        """Return the reasons by client since the last call; None if there are none."""
        reasons, self._reasons = self._reasons, {}
        return {str(client): "; ".join(reasons[client]) for client in sorted(reasons)} or None
