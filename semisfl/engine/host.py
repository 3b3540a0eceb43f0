"""Keep seldom used states in host memory; the device holds only those in use."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from semisfl.engine.weights import State, Unchanging


class HostShelf:
    """Store states by name; those of a GPU are copied to pinned host memory and back.

    Copies are asynchronous: they run in the device's order, and the host does not wait for them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept: dict[str, Unchanging] = {}
        self._lent: dict[str, State] = {}

    def put(self, name: str, state: Mapping[str, Tensor]) -> None:
        self._lent.clear()
        self._kept[name] = Unchanging({key: _on_host(tensor) for key, tensor in state.items()})

    def get(self, name: str) -> State:
        """Return the state on the device. Calls before the next `put` return the same tensors."""
        if name not in self._lent:
            self._lent[name] = {
                key: tensor.to(self.device, non_blocking=True)
                for key, tensor in self._kept[name].items()
            }
        return self._lent[name]

    def keep(self, names: Collection[str]) -> None:
        """Drop all states but these."""
        for name in self._kept.keys() - set(names):
            del self._kept[name]

    def state_dict(self) -> dict[str, Unchanging]:
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # the host reads these tensors, and their copies may not be complete
        return dict(self._kept)

    def load_state_dict(self, state: Mapping[str, State]) -> None:
        self._lent.clear()
        self._kept = {name: Unchanging(one) for name, one in state.items()}


def _on_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.detach().clone()
    room = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return room.copy_(tensor.detach(), non_blocking=True)
