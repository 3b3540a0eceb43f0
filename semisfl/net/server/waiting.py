"""Wait until a round can begin, and say what the run waits for."""

import logging
import time
from collections.abc import Callable, Sequence

from semisfl.net.server.context import ServerContext
from semisfl.net.server.listener import Listener
from semisfl.settings.counts import counted
from semisfl.stopping import Stopped

log = logging.getLogger(__name__)

REMIND_SECONDS = 30.0
FIRST_REPEAT, LONGEST_REPEAT = 0.5, 10.0
"""Seconds before the second repetition in a row of a round below the quorum, and the most; each is twice the one
before. The first repetition is at once: others may be here."""
MOST_NAMES = 10
"""Most devices that a log line names."""


class Waiting:
    """Hold what a run waits for between two rounds. The thread that trains waits here."""

    def __init__(
        self, context: ServerContext, listener: Listener, present: Callable[[], Sequence[int]]
    ) -> None:
        """Take ``present``, which returns the clients that may take part now."""
        self.state: str | None = None
        """One line on why the run waits; None while it trains. Any thread may read it."""
        self._context, self._listener, self._present = context, listener, present
        self._settled = False
        self._aborted = 0
        """Rounds below the quorum in a row."""
        self._paused = self.draining = False

    def pause(self) -> None:
        """Begin no further round until `resume`. Any thread may call."""
        self._set(paused=True, draining=self.draining, event="paused")

    def resume(self) -> None:
        self._set(paused=False, draining=self.draining, event="resumed")

    def drain(self) -> None:
        """Stop the run where the next round would begin, as a signal does."""
        self._set(paused=False, draining=True, event="draining")

    def _set(self, *, paused: bool, draining: bool, event: str) -> None:
        with self._listener.table.changed:
            self._paused, self.draining = paused, draining
            self._listener.table.changed.notify_all()
        log.warning("%s, by the operator", event)
        self._context.device_log.administered(event)

    def after_round(self, aborted: bool) -> None:
        """Note the end of a round; ``aborted``: too few clients answered, and it is repeated."""
        self._aborted = self._aborted + 1 if aborted else 0

    def until_ready(self) -> None:
        """Return once a quorum is there, and not at once if round after round was below it.

        After a start or restart everyone who is enrolled, and as many as a round draws, then get one
        deadline to arrive, so that a restarted run goes on with the same clients.
        """
        network, clients = self._context.config.network, self._context.config.clients
        started = time.monotonic()
        self._check_drained()
        self._before_repetition()
        if not self._settled:
            self.wait(network.quorum, idle=True)
            everyone = max(clients.active, len(self._context.roster.index))
            self.wait(everyone, network.deadline, idle=True)
            self._settled = True
        while True:
            self.wait(network.quorum, idle=True)
            # After waiting, which may have taken days.
            self._listener.penalties.check_certificates()
            if len(self._present()) >= network.quorum and not self._paused:
                break
        if self.state is not None:
            self._set_state(None)
            waited = time.monotonic() - started
            here = counted(len(self._present()), "device")
            log.warning("going on after %.0f s with %s", waited, here)

    def _before_repetition(self) -> None:
        """Pause: clients that are here and were left out may be left out again, and a round takes no time then."""
        if self._aborted < 2:
            return
        seconds = repeat_delay(self._aborted)
        ends = time.monotonic() + seconds
        self._set_state(
            f"{self._aborted} rounds in a row had too few answers; the next begins in {seconds:g} s"
        )
        log.warning("%s", self.state)
        while (left := ends - time.monotonic()) > 0:
            time.sleep(min(0.2, left))
            self._context.drop_arrivals()
            self._context.stop.check()
            self._check_drained()

    def wait(self, count: int, seconds: float | None = None, *, idle: bool = False) -> bool:
        """Wait for ``count`` clients or ``seconds``; return whether the clients are there.

        ``idle``: the run waits, between two rounds. Arrivals and departures meanwhile must not pile up.
        """
        started = time.monotonic()
        reminded: float | None = None
        while True:
            with self._listener.table.changed:
                there = len(self._present())
                if there >= count and not self._paused:
                    return True
                self._set_state(self._describe(there, count, seconds))
                self._listener.table.changed.wait(0.2)
            if idle:
                self._context.drop_arrivals()
            now = time.monotonic()
            self._context.stop.check()
            self._check_drained()
            if seconds is not None and now - started > seconds:
                return False
            if now - started > 1 and (reminded is None or now - reminded > REMIND_SECONDS):
                reminded = now
                log.warning("%s; missing: %s", self.state, self.missing())

    def _check_drained(self) -> None:
        if self.draining:
            raise Stopped

    def _describe(self, there: int, count: int, seconds: float | None) -> str:
        if self._paused:
            return f"paused by the operator ({counted(there, 'device')} here)"
        quorum = self._context.config.network.quorum
        longer = f"; {seconds:g} s for all {count} to come" if seconds and count > quorum else ""
        return f"waiting for devices ({there} here, {quorum} needed{longer})"

    def _set_state(self, state: str | None) -> None:
        if state != self.state:
            self.state = state
            self._context.device_log.renew()

    def missing(self) -> str:
        """Return the names of the enrolled devices that are absent, and how many never came."""
        roster = self._context.roster
        with self._listener.table.changed:
            there = set(self._listener.table.enrolled)
        absent = [name for name, index in roster.index.items() if index not in there]
        unknown = roster.total - len(roster.index)
        never = [f"{unknown} that never came"] if unknown else []
        return ", ".join([*some_of(absent), *never]) or "nobody"


def some_of(names: Sequence[str]) -> list[str]:
    """Return at most MOST_NAMES names, and then how many more there are."""
    more = len(names) - MOST_NAMES
    return [*names[:MOST_NAMES], *([f"{more} more"] if more > 0 else [])]


def repeat_delay(aborted: int) -> float:
    """Return the seconds of pause after so many rounds below the quorum in a row, at least two."""
    return min(LONGEST_REPEAT, FIRST_REPEAT * 2.0 ** min(aborted - 2, 10))
