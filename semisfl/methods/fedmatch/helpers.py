"""FedMatch's helpers: for each client, the models of the clients whose models behave most like its own."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semisfl.algorithm.membership import Membership
from semisfl.engine.host import HostShelf
from semisfl.fleet.base import State


def noise_image(shape: tuple[int, int, int], rng: np.random.Generator) -> Tensor:
    """Return uint8 [1, C, H, W] of Gaussian noise, mean and deviation 125; values outside 0..255 are drawn again."""
    values = rng.normal(125, 125, shape)
    while (outside := (values < 0) | (values > 255)).any():
        values[outside] = rng.normal(125, 125, int(outside.sum()))
    return torch.from_numpy(values.astype(np.uint8)).unsqueeze(0)


def nearest(embeddings: Mapping[int, Tensor], client: int, count: int) -> list[int]:
    """Return the ``count`` other clients whose embeddings lie nearest; none if there are not so many others.

    ``embeddings``: per client the model's prediction for one noise image. Plain distances: a KD-tree gives
    the same answer and pays only for far more clients than these.
    """
    others = [other for other in sorted(embeddings) if other != client]
    if len(others) < count:
        return []
    distances = torch.stack([(embeddings[other] - embeddings[client]).norm() for other in others])
    return [others[place] for place in distances.argsort(stable=True)[:count].tolist()]


class Helpers:
    """The server's memory of its clients' uploads, and of the helpers that each client has.

    An upload stays on the shelf while it is a client's latest or still helps somebody.
    """

    def __init__(self, shelf: HostShelf) -> None:
        """Keep uploads on ``shelf``, in host memory."""
        self._shelf = shelf
        self._embeddings: dict[int, Tensor] = {}
        self._latest: dict[int, str] = {}
        self._helpers: dict[int, list[str]] = {}
        self._membership = Membership()

    def remember(self, client: int, round_index: int, upload: State, embedding: Tensor) -> None:
        """Store a client's upload and its embedding [classes], and free uploads that nobody needs any more."""
        self._embeddings[client] = embedding
        self._latest[client] = f"{client}@{round_index}"
        self._shelf.put(self._latest[client], upload)
        needed = {*self._latest.values(), *(key for keys in self._helpers.values() for key in keys)}
        self._shelf.keep(needed)

    def choose(self, clients: Collection[int], count: int) -> None:
        """Choose new helpers for those of ``clients`` that were seen before."""
        for client in clients:
            if client in self._embeddings:
                chosen = nearest(self._embeddings, client, count)
                self._helpers[client] = [self._latest[helper] for helper in chosen]

    def keep(self, members: Mapping[int, str]) -> None:
        """Forget the uploads of clients that are no ``members``. A client with such a helper has none until the next choice."""
        gone = self._membership.gone(self._latest, members)
        for client in gone:
            del self._embeddings[client], self._latest[client]
        self._helpers = {
            helped: keys
            for helped, keys in self._helpers.items()
            if gone.isdisjoint([helped, *map(_owner, keys)])
        }

    def forget(self) -> None:
        """Remove the helpers of every client."""
        self._helpers.clear()

    def of(self, client: int) -> dict[str, State]:
        """Return ``{"helper0": ..., "helper1": ...}`` on the device; empty if the client has none."""
        return {
            f"helper{place}": self._shelf.get(key)
            for place, key in enumerate(self._helpers.get(client, ()))
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "embeddings": {str(client): value for client, value in self._embeddings.items()},
            "latest": {str(client): key for client, key in self._latest.items()},
            "given": {str(client): keys for client, keys in self._helpers.items()},
            "names": self._membership.state_dict(),
            "shelf": self._shelf.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._embeddings = {
            int(client): value.to(self._shelf.device)
            for client, value in state["embeddings"].items()
        }
        self._latest = {int(client): key for client, key in state["latest"].items()}
        self._helpers = {int(client): list(keys) for client, keys in state["given"].items()}
        self._membership.load_state_dict(state["names"])
        self._shelf.load_state_dict(state["shelf"])


def _owner(key: str) -> int:
    """Return the client whose upload ``key`` names: keys are ``CLIENT@ROUND``."""
    return int(key.partition("@")[0])
