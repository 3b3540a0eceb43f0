"""Put together the status of every enrolled device, for ``fleet.json`` and the exporter."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from semisfl.files import read_json, timestamp
from semisfl.fleet.byte_counts import Traffic
from semisfl.net.server.questions import Questions
from semisfl.net.server.sessions import Sessions


class FleetStatus:
    """Know when each device was last here and what it moved, also before a restart of the server."""

    def __init__(self, sessions: Sessions, traffic: Traffic, questions: Questions) -> None:
        self._sessions, self._roster = sessions, sessions.roster
        self._traffic, self._questions = traffic, questions
        self._latest: dict[str, Mapping[str, Any]] = {}
        """The latest status of each device, by name; at first what an earlier process of this run wrote down."""
        self._moved: Mapping[int, tuple[int, int]] = {}
        self._roster.moved = lambda: self._moved

    def resume(self, directory: Path) -> None:
        """Read what an earlier process of this run wrote about the devices."""
        devices = read_json(directory / "fleet.json").get("clients", [])
        self._latest = {device["name"]: device for device in devices}
        self.count_bytes()

    def count_bytes(self) -> None:
        """Take over the bytes of each client so far, at the end of a round."""
        self._moved = self._traffic.by_client()

    def devices(self) -> list[Mapping[str, Any]]:
        """Return the status of every enrolled device; any thread may call.

        ``client``, ``name``, ``bytes_up`` and ``bytes_down`` (of whole rounds) are always there. The others are there
        if known: ``images``; ``since``, when it came, if it is here; ``seen``, when it was last heard of;
        ``answer_seconds``, how long its answers of the last round took; ``certificate_until``, when its certificate
        expires.
        """
        with self._sessions.changed:
            sessions = dict(self._sessions.enrolled)
            last_seen = dict(self._sessions.last_seen)
        index = self._roster.index  # another one once a device comes
        for name, client in index.items():
            session, latest = sessions.get(client), self._latest.get(name, {})
            at = session.seen if session else last_seen.get(client)
            until = session.certificate.valid_until if session and session.certificate else None
            # A place keeps its counts when another device takes it.
            now, before = self._moved.get(client, (0, 0)), self._roster.before.get(client, (0, 0))
            # They may be those of a checkpoint that is older than the roster.
            up, down = (max(0, total - earlier) for total, earlier in zip(now, before, strict=True))
            seconds = self._questions.last_seconds.get(name)
            status = {
                "client": client,
                "name": name,
                "images": self._roster.images.get(client),
                "since": timestamp(session.since) if session else None,
                "seen": timestamp(at) if at else latest.get("seen"),
                "bytes_up": up,
                "bytes_down": down,
                "answer_seconds": None if seconds is None else round(seconds, 3),
                "certificate_until": timestamp(until.timestamp())
                if until
                else latest.get("certificate_until"),
            }
            self._latest[name] = {key: value for key, value in status.items() if value is not None}
        return [self._latest[name] for name in index]
