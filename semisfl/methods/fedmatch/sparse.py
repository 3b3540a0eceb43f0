"""Sparse deltas: only entries that changed by more than a threshold are sent, and counted."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from semisfl.fleet.base import State


def changed(
    new: Mapping[str, Tensor], old: Mapping[str, Tensor], names: Collection[str], threshold: float
) -> tuple[dict[str, Tensor], int]:
    """What a holder of ``old`` has after the delta to ``new``, and the delta's bytes.

    Entries of the tensors ``names`` cross if they changed by more than ``threshold``: 4 bytes
    each, indices uncounted, as FedMatch's authors count. Other tensors cross whole.
    """
    held, crossing, size = {}, [], 0
    for name, value in new.items():
        if name in names:
            moved = (value - old[name]).abs() > threshold
            held[name] = torch.where(moved, value, old[name])
            crossing.append(moved.sum())
        else:
            held[name] = value
            size += value.numel() * value.element_size()
    return held, size + 4 * int(torch.stack(crossing).sum())


class SparseLinks:
    """What each client holds of the states it exchanges, and what deltas against that count.

    Uploads, and states the client never had, are deltas against the state ``base`` it was sent.
    """

    def __init__(self, names: Collection[str], threshold: float, base: str) -> None:
        self._names, self._threshold, self._base = set(names), threshold, base
        self._known: dict[int, dict[str, State]] = {}
        self._sent: dict[int, dict[str, State]] = {}
        self._sizes: dict[tuple[int, str], int] = {}

    def down(
        self, clients: Iterable[int], current: Mapping[str, State]
    ) -> dict[int, dict[str, State]]:
        """What each client holds after the deltas to ``current``; the first time, all of it."""
        self._sent, self._sizes = {}, {}
        for client in clients:
            self._sent[client] = {}
            for name, new in current.items():
                held, size = new, sum(v.numel() * v.element_size() for v in new.values())
                if client in self._known:
                    held, size = self._delta(new, self._known[client][name])
                self._sent[client][name] = {key: value.clone() for key, value in held.items()}
                self._sizes[client, name] = size
        return self._sent

    def size(self, client: int, direction: str, name: str, state: State) -> int:
        """Bytes that a state of this round counts as."""
        if direction == "down" and (client, name) in self._sizes:
            return self._sizes[client, name]
        return self._delta(state, self._sent[client][self._base])[1]

    def up(self, client: int, upload: State) -> State:
        """What arrives of an upload."""
        arrived, _ = self._delta(upload, self._sent[client][self._base])
        # A copy: what is kept here and elsewhere must not share memory on disk.
        kept = {name: value.clone() for name, value in arrived.items()}
        self._known[client] = {**self._sent[client], self._base: kept}
        return arrived

    def _delta(self, new: State, old: State) -> tuple[State, int]:
        return changed(new, old, self._names, self._threshold)

    def state_dict(self) -> dict[str, Any]:
        return {str(client): states for client, states in self._known.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._known = {int(client): states for client, states in state.items()}
