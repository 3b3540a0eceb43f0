"""Tell the operator how long the answers of each device take, and which device makes the rounds slow."""

import logging
import statistics
from collections import defaultdict
from collections.abc import Mapping

log = logging.getLogger(__name__)

TIMES, SHARE = 3.0, 0.1
"""A device makes a round slow if its answers take this many times the median of the other devices, and this share of
a deadline longer."""


class AnswerSeconds:
    """Add up how long the answers of each device take in a round. The thread that trains adds, any thread may read."""

    def __init__(self, deadline: float) -> None:
        self.last: Mapping[str, float] = {}
        """The seconds of the last round, with its repetitions, by the device's name."""
        self._deadline = deadline
        self._now: defaultdict[str, float] = defaultdict(float)
        self._named: str | None = None

    def add(self, name: str, seconds: float) -> None:
        self._now[name] += seconds

    def end_round(self) -> None:
        """Take over the seconds of this round, and log which device made it slow if that is another than before."""
        self.last, self._now = self._now, defaultdict(float)
        if len(self.last) < 2:
            return
        *others, (slowest, seconds) = sorted(self.last.items(), key=lambda item: item[1])
        usual = statistics.median(took for _, took in others)
        if slowest != self._named and seconds > max(TIMES * usual, usual + SHARE * self._deadline):
            self._named = slowest
            log.warning(
                "%s makes the rounds slow: its answers of this round took %.3g s, those of the others %.3g s at the median",
                slowest,
                seconds,
                usual,
            )
