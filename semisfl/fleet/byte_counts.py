"""Count the bytes between server and clients by kind, direction and client."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

Kind = Literal["model", "teacher", "features", "gradients"]
Direction = Literal["down", "up"]


class Traffic:
    """Count the bytes between server and clients; in a simulation those that would be sent.

    ``counts`` holds them by (kind, direction, client). A checkpoint keeps them.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str, int]] = Counter()
        self._once: dict[tuple[str, str, int], int] = {}

    def add(self, kind: Kind, direction: Direction, client: int, size: int) -> None:
        """Count ``size`` bytes of a kind to (``down``) or from (``up``) one client."""
        self.counts[kind, direction, client] += size

    def send_once(self, kind: Kind, direction: Direction, client: int, size: int) -> None:
        """Set the bytes of what is sent once in a run to ``size``; undoing a round does not undo it."""
        self.counts[kind, direction, client] = self._once[kind, direction, client] = size

    def merge(self, state: Mapping[str, int]) -> None:
        """Add the counts in the `state_dict` of another `Traffic`."""
        other = Traffic()
        other.load_state_dict(state)
        self.counts.update(other.counts)

    def by_kind(self) -> dict[str, int]:
        """Return ``{"model_down": ..., "features_up": ...}`` over all clients."""
        totals: Counter[str] = Counter()
        for (kind, direction, _), size in self.counts.items():
            totals[f"{kind}_{direction}"] += size
        return dict(sorted(totals.items()))

    def by_client(self) -> dict[int, tuple[int, int]]:
        """Return the bytes up and down of each client."""
        moved: dict[int, tuple[int, int]] = {}
        for (_, direction, client), size in self.counts.items():
            up, down = moved.get(client, (0, 0))
            moved[client] = (up + size, down) if direction == "up" else (up, down + size)
        return moved

    def total(self) -> int:
        """Return all bytes, of all kinds and both directions."""
        return sum(self.counts.values())

    def since(self, before: Counter[tuple[str, str, int]]) -> Counter[tuple[str, str, int]]:
        """Return what was counted since ``counts`` were ``before``."""
        return self.counts - before

    def state_dict(self) -> dict[str, int]:
        """Return the bytes sent so far, by kind, direction and client."""
        return {
            f"{kind}/{direction}/{client}": size
            for (kind, direction, client), size in self.counts.items()
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from the bytes of a checkpoint."""
        self.counts.clear()
        for key, size in state.items():
            kind, direction, client = key.split("/")
            self.counts[kind, direction, int(client)] = int(size)
        dict.update(self.counts, self._once)


def group_by_bytes(counts: Mapping[tuple[str, str, int], int]) -> list[dict[str, Any]]:
    """Group clients with the same bytes: ``{"clients": [0, 3], "model_down": 208384, ...}``."""
    each: dict[int, dict[str, int]] = {}
    for (kind, direction, client), size in sorted(counts.items()):
        each.setdefault(client, {})[f"{kind}_{direction}"] = size
    groups: list[dict[str, Any]] = []
    for client, sizes in sorted(each.items()):
        alike = next(
            (group for group in groups if group == sizes | {"clients": group["clients"]}), None
        )
        if alike is None:
            groups.append({"clients": [client], **sizes})
        else:
            alike["clients"].append(client)
    return groups
