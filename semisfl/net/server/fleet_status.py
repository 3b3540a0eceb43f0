"""Put together the status of every enrolled device, for the run's files and for the operator."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from semisfl.files import timestamp
from semisfl.fleet.byte_counts import Traffic
from semisfl.net.server.answer_seconds import AnswerSeconds
from semisfl.net.server.device_log import DeviceStatus, remembered
from semisfl.net.server.roster import Roster
from semisfl.net.server.session_table import SessionTable


class FleetStatus:
    """Know when each device was last here and what it moved, also before a restart of the server."""

    def __init__(
        self, roster: Roster, table: SessionTable, traffic: Traffic, answers: AnswerSeconds
    ) -> None:
        self._roster, self._table, self._traffic = roster, table, traffic
        self._answers = answers
        self._seen: Mapping[int, str] = {}
        self._certificates: dict[int, str] = {}
        """When the certificate that each client showed last expires."""
        self._moved: Mapping[int, tuple[int, int]] = {}
        roster.moved = lambda: self._moved

    def resume(self, directory: Path) -> None:
        """Read what an earlier process of this run wrote about the devices."""
        self._seen = remembered(directory, "seen")
        self._certificates = remembered(directory, "certificate_until")
        self.count_bytes()

    def count_bytes(self) -> None:
        """Take over the bytes of each client so far, at the end of a round."""
        self._moved = self._traffic.by_client()

    def devices(self) -> list[DeviceStatus]:
        """Return the status of every enrolled client. Bytes are of whole rounds; any thread may call."""
        with self._table.changed:
            sessions, last_heard = dict(self._table.enrolled), dict(self._table.last_heard)
        statuses = []
        for name, client in list(self._roster.index.items()):
            session = sessions.get(client)
            at = session.heard_at if session else last_heard.get(client)
            # A place keeps its counts when another device takes it. They may be those of a checkpoint that is
            # older than the roster.
            moved = zip(
                self._moved.get(client, (0, 0)),
                self._roster.before.get(client, (0, 0)),
                strict=True,
            )
            up, down = (max(0, total - earlier) for total, earlier in moved)
            if session and session.certificate:
                until = session.certificate.valid_until.timestamp()
                self._certificates[client] = timestamp(until)
            seconds = self._answers.last.get(name)
            statuses.append(
                DeviceStatus(
                    client=client,
                    name=name,
                    images=self._roster.images.get(client),
                    since=timestamp(session.since) if session else None,
                    seen=self._seen.get(client) if at is None else timestamp(at),
                    bytes_up=up,
                    bytes_down=down,
                    answer_seconds=seconds if seconds is None else round(seconds, 3),
                    certificate_until=self._certificates.get(client),
                )
            )
        return statuses

    def as_dict(self, waiting: str | None) -> dict[str, Any]:
        """Return the devices, the number of places and what the run waits for, as plain values."""
        clients = [device.as_dict() for device in self.devices()]
        return {"clients": clients, "total": self._roster.total, "waiting": waiting}
