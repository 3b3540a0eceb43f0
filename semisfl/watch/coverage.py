"""Which share of their images' pseudo-labels clients kept, over a run of any length."""

import math
from array import array
from collections.abc import Mapping, Sequence


class OfClient:
    """Of one client, over the rounds it was chosen for."""

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
    """Of all clients that were ever chosen, round after round."""

    def __init__(self) -> None:
        self.clients: dict[int, OfClient] = {}
        # As arrays: a run of thousands of rounds has millions of them.
        self._rounds: list[tuple[array[int], array[float]]] = []

    def add(self, round_index: int, shares: Mapping[str, float | None]) -> None:
        """A round, also one without any."""
        clients, values = array("q"), array("d")
        for name, share in shares.items():
            if name.isdigit():
                self.clients.setdefault(int(name), OfClient()).add(round_index, share)
                if share is not None:
                    clients.append(int(name))
                    values.append(share)
        self._rounds.append((clients, values))

    def map(self, rounds: Sequence[int], bins: int) -> tuple[list[int], list[list[float | None]]]:
        """Means over at most ``bins`` runs of rounds: the first round of each, and a row per client,
        by number."""
        width = max(1, math.ceil(len(self._rounds) / bins))
        sums: dict[int, dict[int, tuple[float, int]]] = {}
        for place, (clients, values) in enumerate(self._rounds):
            for client, share in zip(clients, values, strict=True):
                row = sums.setdefault(client, {})
                total, count = row.get(place // width, (0.0, 0))
                row[place // width] = (total + share, count + 1)
        starts = list(rounds[::width])
        grid: list[list[float | None]] = []
        for client in sorted(self.clients):
            means = {place: total / n for place, (total, n) in sums.get(client, {}).items()}
            grid.append(
                [round(means[place], 3) if place in means else None for place in range(len(starts))]
            )
        return starts, grid
