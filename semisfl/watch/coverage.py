"""Record which share of pseudo-labels each client kept, over a run of any length."""

import math
from array import array
from collections.abc import Mapping, Sequence


class OfClient:
    """The shares of one client, over the rounds it was chosen for."""

    def __init__(self) -> None:
        self.rounds = self.missed = 0
        self.total = 0.0
        self.last: float | None = None
        self.last_round = -1

    def add(self, round_index: int, share: float | None) -> None:
        if share is None:
            self.missed += 1
            return
        self.rounds += 1
        self.total += share
        self.last, self.last_round = share, round_index


class Coverage:
    """The shares of all clients that were ever chosen, round by round."""

    def __init__(self) -> None:
        self.clients: dict[int, OfClient] = {}
        # As arrays: a run of thousands of rounds has millions of them.
        self._rounds: list[tuple[array[int], array[float]]] = []

    def add(self, round_index: int, shares: Mapping[str, float | None]) -> None:
        """Add a round, also one without clients."""
        clients, values = array("q"), array("d")
        for name, share in shares.items():
            if share is not None and not 0 <= share <= 1:
                raise ValueError(f"client {name:.20} kept a share of {share:g}")
            if name.isdigit():
                self.clients.setdefault(int(name), OfClient()).add(round_index, share)
                if share is not None:
                    clients.append(int(name))
                    values.append(share)
        self._rounds.append((clients, values))

    def map(self, rounds: Sequence[int], bins: int) -> tuple[list[int], list[list[float | None]]]:
        """Average over at most ``bins`` spans of rounds; return the first round of each, and a list per client."""
        width = max(1, math.ceil(len(self._rounds) / bins))
        sums: dict[int, dict[int, tuple[float, int]]] = {}
        for place, (clients, values) in enumerate(self._rounds):
            for client, share in zip(clients, values, strict=True):
                spans = sums.setdefault(client, {})
                total, count = spans.get(place // width, (0.0, 0))
                spans[place // width] = (total + share, count + 1)
        starts = list(rounds[::width])
        grid: list[list[float | None]] = []
        for client in sorted(self.clients):
            means = {place: total / n for place, (total, n) in sums.get(client, {}).items()}
            grid.append(
                [round(means[place], 3) if place in means else None for place in range(len(starts))]
            )
        return starts, grid
