"""Who takes part in the next round, and the wait until a round can begin."""

import contextlib
import logging
import queue
import time
from collections.abc import Callable, Iterable, Sequence

from semisfl.net.server.sessions import Sessions
from semisfl.settings.config import Config
from semisfl.settings.counts import plural
from semisfl.stopping import StopFlag

log = logging.getLogger(__name__)

PASSED_OVER = 10
"""Good rounds in which a client is not drawn after it left a round below the quorum, was far too slow, or stood out in
a round that diverged."""
REMIND_SECONDS = 30.0
FIRST_REPEAT, LONGEST_REPEAT = 0.5, 10.0
"""Seconds before the second repetition in a row of a round below the quorum, and the most; each is twice the one
before. The first repetition is at once: others may be here."""
MOST_NAMES = 10
"""Most devices that a log line names."""


class Waiting:
    """Decide who is drawn, and wait between two rounds. Only the thread that trains waits here."""

    def __init__(
        self,
        config: Config,
        sessions: Sessions,
        stop: StopFlag,
        here: Callable[[], set[int]] | None = None,
    ) -> None:
        """``here`` returns the clients that may be drawn; None: those that are connected, which are waited for."""
        self.state: str | None = None
        """One line on why the run waits; None while it trains. Any thread may read it."""
        self._network, self._active = config.network, config.clients.active
        self._sessions, self._stop = sessions, stop
        self._settled = here is not None
        self._here = here or (lambda: set(sessions.enrolled))
        self._aborted = 0
        """Rounds below the quorum in a row."""
        # By name: once a device is removed, another may have its place.
        self._passed_over: dict[str, int] = {}
        """Devices that are not drawn for a while, the latest last, and for how many good rounds."""

    # --- who takes part ----------------------------------------------------------------------------

    def present(self) -> list[int]:
        """Return the clients that may be drawn; any thread may call.

        These are all that are here without those that are passed over. If the others are too few for a round, those
        that were passed over first fill it up, so that the latest culprit is not drawn again and again.
        """
        with self._sessions.changed:
            here = self._here()
        index = self._sessions.roster.index
        waiting = [place for name in self._passed_over if (place := index.get(name)) in here]
        drawn = here.difference(waiting)
        return sorted(drawn.union(waiting[: max(0, self._network.quorum - len(drawn))]))

    def pass_over(self, names: Iterable[str]) -> None:
        """Draw others than these devices for a while."""
        for name in names:
            self._passed_over.pop(name, None)
            self._passed_over[name] = PASSED_OVER

    def after_round(self, *, aborted: bool = False, good: bool = False) -> None:
        """Note the end of a round; ``aborted``: too few clients answered; ``good``: its result counts."""
        self._aborted = self._aborted + 1 if aborted else 0
        if good:
            left = {name: rounds - 1 for name, rounds in self._passed_over.items()}
            self._passed_over = {name: rounds for name, rounds in left.items() if rounds}

    # --- the wait ----------------------------------------------------------------------------------

    def until_ready(self) -> None:
        """Return once a quorum is there, and not at once if round after round was below it.

        After a start or restart everyone who is enrolled, and as many as a round draws, then get one
        deadline to arrive, so that a restarted run goes on with the same clients.
        """
        started, everyone = time.monotonic(), max(self._active, len(self._sessions.roster.index))
        verb = "goes on" if self._settled else "starts"
        self._pause()
        if not self._settled:
            self.wait(self._network.quorum)
            self.wait(everyone, self._network.deadline)
            self._settled = True
        here = 0
        while here < self._network.quorum:
            self.wait(self._network.quorum)
            # After waiting, which may have taken days.
            self._sessions.review()
            here = len(self.present())
        if self.state is not None:
            self._set_state(None)
            if here >= everyone:
                log.info("all %s are here; training %s", plural(here, "device"), verb)
            else:
                waited = time.monotonic() - started
                log.warning("going on after %.0f s with %s", waited, plural(here, "device"))

    def _pause(self) -> None:
        """Wait before a round is repeated again: clients that are here may be left out of it at once again."""
        if self._aborted < 2:
            return
        seconds = min(LONGEST_REPEAT, FIRST_REPEAT * 2.0 ** min(self._aborted - 2, 10))
        ends = time.monotonic() + seconds
        self._set_state(
            f"{self._aborted} rounds in a row had too few answers; the next begins in {seconds:g} s"
        )
        log.warning("%s", self.state)
        while (left := ends - time.monotonic()) > 0:
            time.sleep(min(0.2, left))
            self._idle()

    def wait(self, count: int, seconds: float | None = None) -> bool:
        """Wait for ``count`` clients or ``seconds``; return whether the clients are there."""
        started = time.monotonic()
        reminded: float | None = None
        while True:
            with self._sessions.changed:
                there = len(self.present())
                if there >= count:
                    return True
                longer = f"; {seconds:g} s for all {count} to come" if seconds else ""
                needed = (
                    f"{there} here, {self._network.quorum if seconds else count} needed{longer}"
                )
                self._set_state(f"waiting for devices ({needed})")
                self._sessions.changed.wait(0.2)
            self._idle()
            now = time.monotonic()
            if seconds is not None and now - started > seconds:
                return False
            if now - started > 1 and (reminded is None or now - reminded > REMIND_SECONDS):
                reminded = now
                log.warning("%s; missing: %s", self.state, self.missing())

    def _idle(self) -> None:
        """Forget what arrived while nobody is awaited; raise `Stopped` if the run was asked to end."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._sessions.inbox.get_nowait()
        self._stop.check()

    def _set_state(self, state: str | None) -> None:
        if state != self.state:
            self.state = state
            self._sessions.device_log.renew()

    def missing(self) -> str:
        """Return the names of the enrolled devices that are absent, and how many are not enrolled yet."""
        roster = self._sessions.roster
        with self._sessions.changed:
            there = self._here()
        absent = [name for name, index in roster.index.items() if index not in there]
        unknown = roster.total - len(roster.index)
        never = [f"{unknown} not enrolled yet"] if unknown else []
        return ", ".join([*some_of(absent), *never]) or "nobody"


def some_of(names: Sequence[str]) -> list[str]:
    """Return at most MOST_NAMES names, and then how many more there are."""
    more = len(names) - MOST_NAMES
    return [*names[:MOST_NAMES], *([f"{more} more"] if more > 0 else [])]
