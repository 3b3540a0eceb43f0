"""Find the client that ruined a round: repeat the round without it, and strike it if that helps."""

import logging
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from semisfl.fleet.base import AbnormalValues
from semisfl.net.server.listener import Listener
from semisfl.net.server.questions import Questions
from semisfl.net.server.roster import Roster
from semisfl.net.server.value_checks import impossible, ranges, sizes
from semisfl.settings.config import Config
from semisfl.settings.robust import FEWEST

log = logging.getLogger(__name__)

PASSED_OVER = 10
"""Good rounds in which a client is not drawn after it left a round below the quorum, or was far too slow."""


def limits_on_one_client(config: Config) -> tuple[int, str]:
    """Return a log level and a line that says what one client can do to the run."""
    active, robust = config.clients.active, config.robust
    rules = f"robust.aggregate = {robust.aggregate}, robust.features = {robust.features}"
    if active < FEWEST:
        return logging.WARNING, (
            f"clients.active = {active}: a single device can ruin the run; limits need {FEWEST}"
        )
    if robust.aggregate == "mean" or robust.features == "as_sent":
        return logging.WARNING, f"{rules}: a single device can ruin the run; the defaults limit it"
    limited = f"each device's influence is limited: {rules}"
    if (quorum := config.network.quorum) < FEWEST:
        limited += (
            f"; not in a round of fewer than {FEWEST} devices, which network.quorum = {quorum} allows: "
            f"set network.quorum={FEWEST} to wait for more"
        )
    return logging.INFO, limited


class Trials:
    """Keep the clients that are left out of the round being repeated, to see whether it is good then."""

    def __init__(
        self, questions: Questions, roster: Roster, listener: Listener, quorum: int
    ) -> None:
        self._size_checks, self._name = questions.size_checks, questions.name
        self._roster, self._listener, self._quorum = roster, listener, quorum
        # By name: once a device is removed, another may have its place.
        self._accused: list[str] = []
        self._passed_over: dict[str, int] = {}
        """Clients that are not drawn for a while, the latest last, and for how many good rounds."""

    def present(self) -> list[int]:
        """Return the clients that are here and not on trial; any thread may call.

        Without those that are passed over. If the others are too few for a round, those that were passed over
        first fill it up, so that the latest culprit is not drawn again and again.
        """
        here = self._here()
        waiting = [place for place in self._places(self._passed_over) if place in here]
        drawn = here.difference(waiting)
        return sorted(drawn.union(waiting[: max(0, self._quorum - len(drawn))]))

    def _here(self) -> set[int]:
        with self._listener.table.changed:
            return self._listener.table.enrolled.keys() - set(self._places(self._accused))

    def _places(self, names: Iterable[str]) -> list[int]:
        index = self._roster.index
        return [index[name] for name in names if name in index]

    def pass_over(self, clients: Iterable[int]) -> None:
        """Draw others for a while: these left a round below the quorum, or everybody waited for them."""
        latest = dict.fromkeys(map(self._name, clients), PASSED_OVER)
        earlier = {name: left for name, left in self._passed_over.items() if name not in latest}
        self._passed_over = {**earlier, **latest}

    def end_if_needed(self) -> None:
        """End all trials if too few other clients are here: the run must not wait for a culprit."""
        if self._accused and len(self._here()) < self._quorum:
            names = ", ".join(self._accused)
            log.warning("%s may take part again: too few others are here", names)
            self._accused.clear()

    def settle(self, good: bool) -> str | None:
        """End a round; return the name of the client that the repetition leaves out, or None."""
        if not good:
            suspect = self._accuse()
            if suspect is None:
                self._accused.clear()
            return suspect
        self._size_checks.remember()
        self._passed_over = {n: left - 1 for n, left in self._passed_over.items() if left > 1}
        if self._accused:
            # The round was bad with this client and good without it.
            self._listener.penalties.strike(
                self._accused[-1], "the round diverged with its values and not without"
            )
        self._accused.clear()
        return None

    def check_sent(self, sent: Mapping[str, Tensor], give_up: Callable[[], None]) -> None:
        """Abort before sending abnormal values, and retry without the likely cause."""
        extremes = ranges(sent)
        fault = impossible(sent, extremes)
        if not self._size_checks.note_sent(sizes(extremes)):
            return
        suspect = self._accuse()
        if suspect is None and fault is None:
            return
        give_up()
        stands_out = f"; {suspect} stands out" if suspect else ""
        fault_text = f"impossible: {fault}" if fault else "far from usual"
        raise AbnormalValues(f"the values that the server computed are {fault_text}{stands_out}")

    def _accuse(self) -> str | None:
        """Exclude the most suspicious client from the retry and return its name, or None."""
        suspect = self._size_checks.suspect(self._places(self._accused))
        if suspect is None:
            return None
        name = self._name(suspect)
        if len(self._here()) <= self._quorum:
            log.warning(
                "%s stands out; the round cannot be repeated without it, because network.quorum = %d",
                name,
                self._quorum,
            )
            return None
        self._accused.append(name)
        return name
