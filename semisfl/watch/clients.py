"""What a run's files say about its clients and devices, summed up as lines arrive.

Coverage is the share of a client's pseudo-labels that were confident enough to be trained on. Events are what
happened to the devices of a served run: they connected, were left out of a round, refused or removed.
"""

import json
import math
from array import array
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

LATEST = 300
"""Events that are kept to be shown; older ones are only counted."""


class ClientCoverage:
    """The coverage of one client: the share of its pseudo-labels that were kept, for the rounds it took part in."""

    def __init__(self) -> None:
        self.rounds = self.missed = 0
        """Rounds in which it answered, and in which it was chosen and did not."""
        self.total = 0.0
        """The sum of its shares."""
        self.last: float | None = None
        self.last_round = -1
        self.spans: dict[int, tuple[float, int]] = {}
        """For each span of rounds, the sum of its shares and their number."""

    def add(self, round_index: int, span: int, share: float) -> None:
        """Add a round; a ``share`` of NaN: the client was chosen and did not answer."""
        if math.isnan(share):
            self.missed += 1
            return
        self.rounds += 1
        self.total += share
        self.last, self.last_round = share, round_index
        total, count = self.spans.get(span, (0.0, 0))
        self.spans[span] = (total + share, count + 1)

    def means(self, spans: int) -> list[float | None]:
        """Return the mean share of each of the first ``spans`` spans; None: it never answered in it."""
        means = {span: round(total / count, 3) for span, (total, count) in self.spans.items()}
        return [means.get(span) for span in range(spans)]


class Coverage:
    """The coverage of all clients that were ever chosen, round by round."""

    def __init__(self) -> None:
        # As arrays: a run of thousands of rounds has millions of shares.
        self._rounds: list[tuple[int, array[int], array[float]]] = []

    def add(self, round_index: int, shares: Mapping[str, float | None]) -> None:
        """Add a round: the share of each chosen client by its number; None: it did not answer."""
        clients, values = array("q"), array("d")
        for name, share in shares.items():
            clients.append(int(name))
            values.append(math.nan if share is None else share)
        self._rounds.append((round_index, clients, values))

    def over(
        self, bins: int, since: Mapping[int, int] | None = None
    ) -> tuple[list[int], dict[int, ClientCoverage]]:
        """Return the first round of each of at most ``bins`` spans of rounds, and each client by number.

        ``since``: first rounds of clients whose earlier rounds were those of another device in their place.
        """
        since, width = since or {}, max(1, math.ceil(len(self._rounds) / bins))
        clients: dict[int, ClientCoverage] = {}
        for place, (index, chosen, values) in enumerate(self._rounds):
            for client, share in zip(chosen, values, strict=True):
                if index >= since.get(client, 0):
                    one = clients.setdefault(client, ClientCoverage())
                    one.add(index, place // width, share)
        return [index for index, _, _ in self._rounds[::width]], dict(sorted(clients.items()))


class DeviceEvents:
    """The events of ``fleet.jsonl``: the latest ones, how many there were, and which devices are turned away."""

    def __init__(self) -> None:
        self.latest: deque[dict[str, Any]] = deque(maxlen=LATEST)
        self.counts: Counter[str] = Counter()
        """How many events of each kind there were."""
        self.left_out: dict[int, tuple[int, str]] = {}
        """For each client: how often it was left out of a round, and the last reason."""
        self.since: dict[int, int] = {}
        """For each place that was freed, the first round in which another device may have had it."""
        self.turned_away: dict[str, dict[str, Any]] = {}
        """Devices that may not take part now, by name: state, reason and time."""

    def add(self, line: bytes) -> None:
        """Take in one line of the file; a damaged one is left out."""
        try:
            event = json.loads(line)
            kind, client = str(event["event"]), event.get("client")
        except (ValueError, TypeError, KeyError, AttributeError):
            return
        self.latest.append(event)
        self.counts[kind] += 1
        name, reason = str(event.get("name", "?")), str(event.get("reason", ""))
        if kind == "left_out" and isinstance(client, int):
            self.left_out[client] = (self.left_out.get(client, (0, ""))[0] + 1, reason)
        elif kind == "removed" and isinstance(client, int):
            # Another device may take the place.
            self.left_out.pop(client, None)
            if isinstance(done := event.get("round"), int):
                self.since[client] = done + 1
        if kind == "here":
            self.turned_away.pop(name, None)
        elif kind in ("refused", "removed") and name != "?":
            # A device that refuses by its own policy writes the reason itself.
            revoked = event.get("by") != "device" and reason.endswith("is revoked")
            state = "revoked" if revoked else kind
            self.turned_away[name] = {"state": state, "reason": reason, "seen": event.get("time")}
