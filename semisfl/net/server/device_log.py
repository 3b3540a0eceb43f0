"""Write what happens to devices, and the current status of each, for people, `semisfl fleet` and the page.

``fleet.jsonl`` in the run's directory has one line per event:

- ``time``, ``event``, ``name`` of the device, and ``round``, the last round that had begun;
- ``event`` is ``here``, ``gone``, ``left_out``, ``held_back``, ``refused`` or ``removed``; ``changed`` is written for a
  setting of the whole fleet that was changed at a resume;
- ``client``, ``images``, ``peer`` and ``reason`` where they are known; ``by`` says whether the server or the device
  states the reason of a refusal.

``fleet.json`` is replaced every few seconds with what `NetworkFleet.status` returns. The run itself needs neither
file, so an error of the disk is logged once and stops nothing.
"""

import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from semisfl.files import append_whole, timestamp, write_whole
from semisfl.net.server.admission import audit

log = logging.getLogger(__name__)

SNAPSHOT_SECONDS = 5.0
LONGEST_REASON = 300


class DeviceLog:
    """Write events and status; any thread may call. Nothing goes to disk before `open` or after `close`."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()
        """How many of each kind since this process began."""
        self.round: int | None = None
        """The last round that began, by its number in ``metrics.jsonl``."""
        self._lock = threading.Lock()
        self._directory: Path | None = None
        self._failed = False
        self._ended, self._renew = threading.Event(), threading.Event()
        self._writer: threading.Thread | None = None

    def open(self, directory: Path, status: Callable[[], Mapping[str, Any]]) -> None:
        """Write events to ``directory`` from now on, and every few seconds what ``status`` returns."""
        self._directory = directory
        self._writer = threading.Thread(
            target=self._keep, args=(directory / "fleet.json", status), daemon=True
        )
        self._writer.start()

    def close(self) -> None:
        """Write the final status."""
        if self._writer is not None:
            self._ended.set()
            self._renew.set()
            self._writer.join()
            self._writer = self._directory = None

    def renew(self) -> None:
        """Write the status soon, without waiting for the disk here."""
        self._renew.set()

    def refused(self, peer: str, name: str, reason: str, by: str = "server") -> None:
        """Record a refused or disconnected device, also in the audit log; ``by`` states the reason."""
        peer = unquote(peer)
        audit(peer, name, reason)
        self.note("refused", name, peer=peer, reason=reason[:LONGEST_REASON], by=by)

    def note(self, event: str, name: str, **more: Any) -> None:
        """Record an event of the device ``name``, with what ``more`` is known of it."""
        self.events[event] += 1
        if (directory := self._directory) is not None:
            entry = {"time": timestamp(), "event": event, "name": name, **more}
            if self.round is not None:
                entry["round"] = self.round
            line = (json.dumps(entry) + "\n").encode()
            with self._lock:
                self._write(lambda: append_whole(directory / "fleet.jsonl", line))

    def _keep(self, path: Path, status: Callable[[], Mapping[str, Any]]) -> None:
        ended = False
        while not ended:
            self._renew.wait(SNAPSHOT_SECONDS)
            self._renew.clear()
            ended = self._ended.is_set()
            content = json.dumps({"time": timestamp(), **status()}).encode()
            self._write(partial(write_whole, path, content))

    def _write(self, write: Callable[[], None]) -> None:
        try:
            write()
            self._failed = False
        except OSError as error:
            if not self._failed:
                log.warning("cannot write the devices' events and status: %s", error)
            self._failed = True
