"""Follow the events of a fleet: the latest ones, how many there were, and how each device stands."""

from collections import Counter, deque
from typing import Any

from semisfl.files import parse_json

LATEST = 300
"""Events that are kept to be shown; older ones are only counted."""


class DeviceEvents:
    """All that ``fleet.jsonl`` says."""

    def __init__(self) -> None:
        self.latest: deque[dict[str, Any]] = deque(maxlen=LATEST)
        self.counts: Counter[str] = Counter()
        self.left_out: dict[int, tuple[int, str]] = {}
        """For each client: how often it was left out, and the last reason."""
        self.since: dict[int, int] = {}
        """For each place that was freed, the first round in which another device may have had it."""
        self.turned_away: dict[str, dict[str, Any]] = {}
        """Devices that may not take part now, by name: state, reason and time."""

    def add(self, line: bytes) -> None:
        """Take in one line of the file; a damaged one is left out."""
        try:
            event = parse_json(line)
            kind, client = str(event["event"]), event.get("client")
        except (ValueError, TypeError, KeyError, AttributeError):
            return
        self.latest.append(event)
        self.counts[kind] += 1
        if kind == "left_out" and isinstance(client, int):
            often = self.left_out.get(client, (0, ""))[0] + 1
            self.left_out[client] = (often, str(event.get("reason", "")))
        elif kind == "removed" and isinstance(client, int):
            # Another device may take the place.
            self.left_out.pop(client, None)
            if isinstance(done := event.get("round"), int):
                self.since[client] = done + 1
        self._turn_away(kind, str(event.get("name", "?")), event)

    def _turn_away(self, kind: str, name: str, event: dict[str, Any]) -> None:
        if kind == "here":
            self.turned_away.pop(name, None)
        elif kind in ("refused", "removed") and name != "?":
            reason = str(event.get("reason", ""))
            ends = ("its certificate is revoked", f"the certificate of {name} is revoked")
            # Runs of earlier versions do not say who stated the reason.
            by = event.get("by", "device" if "the client's policy: " in reason else "server")
            state = "revoked" if by == "server" and reason.endswith(ends) else kind
            self.turned_away[name] = {"state": state, "reason": reason, "seen": event.get("time")}
