"""Hold what the parts of a server share while it serves one run."""

import contextlib
import queue
from dataclasses import dataclass, field

from semisfl.fleet.byte_counts import Traffic
from semisfl.fleet.held_back import HeldBack
from semisfl.net.messages import Schemas
from semisfl.net.server.device_log import DeviceLog
from semisfl.net.server.roster import Roster
from semisfl.net.server.session import Session
from semisfl.net.terms import Terms
from semisfl.settings.config import Config
from semisfl.stopping import StopFlag

Arrival = tuple[Session, int, bytearray | None]
"""The session, the ticket that is answered, and the frame; None: the connection is lost."""


@dataclass(frozen=True)
class ServerContext:
    terms: Terms
    schemas: Schemas
    roster: Roster
    traffic: Traffic
    held_back: HeldBack
    stop: StopFlag
    device_log: DeviceLog = field(default_factory=DeviceLog)
    inbox: queue.Queue[Arrival] = field(default_factory=queue.Queue)
    """From the listener's loop to the thread that trains. Before Python 3.13 a signal at the wrong moment
    makes the wait of a SimpleQueue endless."""

    def drop_arrivals(self) -> None:
        """Forget what arrived; only the thread that trains calls it, and between two rounds nothing is awaited."""
        with contextlib.suppress(queue.Empty):
            while True:
                self.inbox.get_nowait()

    @property
    def config(self) -> Config:
        return self.terms.config
