"""Keep seldom used states in host memory; the device holds only those in use."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from semisfl.engine.weights import State, Unchanging


class HostShelf:
    """Store states by name; those of a GPU are copied to pinned host memory and back.

    Copies are asynchronous: they run in the device's order, and the host does not wait for them. `get` lends
    a copy on the device, which is freed with the next `put`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept: dict[str, Unchanging] = {}
        self._lent: dict[str, State] = {}

    def put(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Store a copy of ``state`` under ``name``, and free the copies that were lent."""
        self._lent.clear()
        self._kept[name] = Unchanging({key: _on_host(tensor) for key, tensor in state.items()})

    def __contains__(self, name: str) -> bool:
        return name in self._kept

    def get(self, name: str) -> State:
        """Return the state on the device. Calls before the next `put` return the same tensors."""
        if name not in self._lent:
            self._lent[name] = {
                key: tensor.to(self.device, non_blocking=True)
                for key, tensor in self._kept[name].items()
            }
        return self._lent[name]

    def keep(self, names: Collection[str]) -> None:
        """Free all states but those of these names."""
        for name in self._kept.keys() - set(names):
            del self._kept[name]

    def state_dict(self) -> dict[str, Unchanging]:
        """Return all states, on the host, once their copies are complete."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # the host reads these tensors, and their copies may not be complete
        return dict(self._kept)

    def load_state_dict(self, state: Mapping[str, State]) -> None:
        self._lent.clear()
        self._kept = {name: Unchanging(one) for name, one in state.items()}


def _on_host(tensor: Tensor) -> Tensor:
    """Return a copy of ``tensor`` in host memory, pinned if it comes from a GPU."""
    if not tensor.is_cuda:
        return tensor.detach().clone()
    room = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return room.copy_(tensor.detach(), non_blocking=True)
