"""Write what happens to devices: every event, and the current status of each.

``fleet.jsonl`` and ``fleet.json`` in the run's directory. The run itself does not need them, so an error
of the disk is logged once and stops nothing.
"""

import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from semisfl.files import append_whole, read_json, timestamp, write_whole
from semisfl.net.server.admission import audit, audit_held_back
from semisfl.net.server.refusals import Refusals

log = logging.getLogger(__name__)

SNAPSHOT_SECONDS = 5.0
LONGEST_REASON = 300


class _Plain:
    def as_dict(self) -> dict[str, Any]:
        """Return what is known, as plain values."""
        return {key: value for key, value in vars(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class FleetEvent(_Plain):
    """Describe an event of one device: one line of ``fleet.jsonl``."""

    time: str
    event: str
    """``here``, ``gone``, ``left_out``, ``held_back``, ``refused`` or ``removed``; of the whole fleet
    ``paused``, ``resumed``, ``draining``, and ``changed`` for a setting changed at a resume."""
    name: str
    round: int | None = None
    """The last round that had begun."""
    client: int | None = None
    images: int | None = None
    peer: str | None = None
    reason: str | None = None
    by: str | None = None
    """Speaker of a refusal's reason: ``server`` or ``device``."""


@dataclass(frozen=True, kw_only=True)
class DeviceStatus(_Plain):
    """Describe an enrolled device's current status: one entry of ``fleet.json``."""

    client: int
    name: str
    images: int | None = None
    since: str | None = None
    """When it came; None: it is not here."""
    seen: str | None = None
    """When it was last heard of."""
    bytes_up: int = 0
    bytes_down: int = 0
    answer_seconds: float | None = None
    """How long its answers of the last round took, together; None: it was not in it."""
    certificate_until: str | None = None
    """When the certificate that it showed last expires."""


class DeviceLog:
    """Write events and status; any thread may call. Nothing goes to disk before `open` or after `close`."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()
        """How many of each kind since this process began."""
        self.round: int | None = None
        """The last round that began, by its number in ``metrics.jsonl``; events have it."""
        self._refusals = Refusals(self._tell_refused)
        self._lock = threading.Lock()
        self._directory: Path | None = None
        self._failed = False
        self._ended, self._renew = threading.Event(), threading.Event()
        self._writer: threading.Thread | None = None

    def open(
        self,
        directory: Path,
        standing: Callable[[], Sequence[DeviceStatus]],
        waiting: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Write events from now on, and every few seconds the status.

        ``standing`` returns the status of each device, ``waiting`` what the run waits for.
        """
        self._directory = directory
        self._writer = threading.Thread(target=self._keep, args=(standing, waiting), daemon=True)
        self._writer.start()

    def close(self) -> None:
        """Write the final status."""
        self._refusals.sum_up()
        if self._writer is not None:
            self._ended.set()
            self._renew.set()
            self._writer.join()
            self._writer = None
            self._directory = None

    def renew(self) -> None:
        """Write the status soon, without waiting for the disk here."""
        self._renew.set()

    def here(self, name: str, client: int, images: int) -> None:
        self._note("here", name, client=client, images=images)

    def gone(self, name: str, client: int) -> None:
        self._note("gone", name, client=client)

    def left_out(self, name: str, client: int, reason: str) -> None:
        self._note("left_out", name, client=client, reason=reason)

    def removed(self, name: str, client: int, reason: str) -> None:
        self._note("removed", name, client=client, reason=reason)

    def administered(self, event: str) -> None:
        """Record that the operator paused, resumed or drained the whole fleet."""
        self._note(event, "fleet", reason="by the operator")

    def refused(self, peer: str, name: str, reason: str, by: str = "server") -> None:
        """Record a refused or disconnected client, also in the audit log, where one line may sum up many."""
        self.events["refused"] += 1
        self._refusals.note(unquote(peer), name, reason, by)

    def _tell_refused(self, peer: str, name: str, reason: str, by: str) -> None:
        audit(peer, name, reason)
        self._append("refused", name, peer=peer, reason=reason, by=by)

    def held_back(self, peer: str, name: str, reason: str) -> None:
        peer = unquote(peer)
        audit_held_back(peer, name, reason)
        self._note("held_back", name, peer=peer, reason=reason)

    def _note(self, event: str, name: str, **more: Any) -> None:
        self.events[event] += 1
        self._append(event, name, **more)

    def _append(self, event: str, name: str, *, reason: str | None = None, **more: Any) -> None:
        cut = reason if reason is None else reason[:LONGEST_REASON]
        entry = FleetEvent(
            time=timestamp(), event=event, name=name, round=self.round, reason=cut, **more
        )
        directory = self._directory
        if directory is not None:
            line = (json.dumps(entry.as_dict()) + "\n").encode()
            with self._lock:
                self._write(lambda: append_whole(directory / "fleet.jsonl", line))

    def _keep(
        self,
        standing: Callable[[], Sequence[DeviceStatus]],
        waiting: Callable[[], str | None],
    ) -> None:
        ended = False
        while not ended:
            self._renew.wait(SNAPSHOT_SECONDS)
            self._renew.clear()
            ended = self._ended.is_set()
            self._snapshot(standing(), None if ended else waiting())

    def _snapshot(self, devices: Sequence[DeviceStatus], waiting: str | None) -> None:
        assert self._directory is not None
        path = self._directory / "fleet.json"
        content: dict[str, Any] = {"time": timestamp()}
        if waiting is not None:
            content["waiting"] = waiting
        content["clients"] = [device.as_dict() for device in devices]
        self._write(lambda: write_whole(path, json.dumps(content).encode()))

    def _write(self, write: Callable[[], None]) -> None:
        try:
            write()
            self._failed = False
        except OSError as error:
            if not self._failed:
                log.warning("cannot write the devices' events and status: %s", error)
            self._failed = True


def remembered(directory: Path, key: str) -> dict[int, str]:
    """Return what an earlier process of this run wrote under ``key`` of each device's status."""
    devices = read_json(directory / "fleet.json").get("clients", [])
    return {one["client"]: str(one[key]) for one in devices if key in one}
