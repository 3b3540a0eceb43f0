"""States that are seldom needed, in the host's memory; a device holds those that are in use."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from semisfl.engine.weights import State, Unchanging


class HostShelf:
    """States by name, for ``device``: a GPU's are copied to pinned memory, and lent from there.

    Nobody waits for a copy: it is made in its turn, like everything that a device does.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept: dict[str, Unchanging] = {}
        self._lent: dict[str, State] = {}

    def put(self, name: str, state: Mapping[str, Tensor]) -> None:
        self._lent.clear()
        self._kept[name] = Unchanging({key: _on_host(tensor) for key, tensor in state.items()})

    def get(self, name: str) -> State:
        """On the device. Whoever asks again before the next `put` shares it."""
        if name not in self._lent:
            self._lent[name] = {
                key: tensor.to(self.device, non_blocking=True)
                for key, tensor in self._kept[name].items()
            }
        return self._lent[name]

    def keep(self, names: Collection[str]) -> None:
        """Only these."""
        for name in self._kept.keys() - set(names):
            del self._kept[name]

    def state_dict(self) -> dict[str, Unchanging]:
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # the host is about to read what may still be on its way
        return dict(self._kept)

    def load_state_dict(self, state: Mapping[str, State]) -> None:
        self._lent.clear()
        self._kept = {name: Unchanging(one) for name, one in state.items()}


def _on_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.detach().clone()
    room = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return room.copy_(tensor.detach(), non_blocking=True)
