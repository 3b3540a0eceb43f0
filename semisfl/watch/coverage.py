"""Record which share of pseudo-labels each client kept, over a run of any length."""

import math
from array import array
from collections.abc import Mapping


class OfClient:
    """The shares of one client, over the rounds it was chosen for."""

    def __init__(self) -> None:
        self.rounds = self.missed = 0
        self.total = 0.0
        self.last: float | None = None
        self.last_round = -1
        self.spans: dict[int, tuple[float, int]] = {}
        """For each span of rounds, the sum of its shares and how many they are."""

    def add(self, round_index: int, span: int, share: float) -> None:
        """Add a round; NaN: the client was chosen and did not answer."""
        if math.isnan(share):
            self.missed += 1
            return
        self.rounds += 1
        self.total += share
        self.last, self.last_round = share, round_index
        total, count = self.spans.get(span, (0.0, 0))
        self.spans[span] = (total + share, count + 1)

    def means(self, spans: int) -> list[float | None]:
        """Return the mean of each of so many spans."""
        means = {span: round(total / count, 3) for span, (total, count) in self.spans.items()}
        return [means.get(span) for span in range(spans)]


class Coverage:
    """The shares of all clients that were ever chosen, round by round."""

    def __init__(self) -> None:
        # As arrays: a run of thousands of rounds has millions of them.
        self._rounds: list[tuple[int, array[int], array[float]]] = []

    def add(self, round_index: int, shares: Mapping[str, float | None]) -> None:
        """Add a round, also one without clients."""
        clients, values = array("q"), array("d")
        for name, share in shares.items():
            if share is not None and not 0 <= share <= 1:
                raise ValueError(f"client {name:.20} kept a share of {share:g}")
            if name.isdigit():
                clients.append(int(name))
                values.append(math.nan if share is None else share)
        self._rounds.append((round_index, clients, values))

    def over(
        self, bins: int, since: Mapping[int, int] | None = None
    ) -> tuple[list[int], dict[int, OfClient]]:
        """Return the first round of each of at most ``bins`` spans of rounds, and each client by number.

        ``since``: first rounds of clients whose earlier rounds were those of another one in their place.
        """
        since, width = since or {}, max(1, math.ceil(len(self._rounds) / bins))
        clients: dict[int, OfClient] = {}
        for place, (index, chosen, values) in enumerate(self._rounds):
            for client, share in zip(chosen, values, strict=True):
                if index >= since.get(client, 0):
                    clients.setdefault(client, OfClient()).add(index, place // width, share)
        return [index for index, _, _ in self._rounds[::width]], dict(sorted(clients.items()))
