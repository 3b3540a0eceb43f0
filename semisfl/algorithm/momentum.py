"""Momentum of the server in averaging (FedAvgM, Hsu et al., 2019)."""

import torch
from torch import Tensor, nn

from semisfl.engine.weights import State


class ServerMomentum:
    """v <- m v + (mean - w); w <- w + v, over the parameters of ``module``. Buffers are the mean's."""

    def __init__(self, module: nn.Module, momentum: float) -> None:
        self.module, self.momentum = module, momentum
        names = [name for name, _ in module.named_parameters()] if momentum else []
        start = module.state_dict()
        self._velocity = {name: torch.zeros_like(start[name]) for name in names}

    @torch.no_grad()
    def after(self, mean: State) -> State:
        """What the module is to become, of the clients' ``mean``; it still holds what they were sent."""
        before = self.module.state_dict()
        moved = dict(mean)
        for name, velocity in self._velocity.items():
            velocity.mul_(self.momentum).add_(mean[name].to(velocity.device) - before[name])
            moved[name] = before[name] + velocity
        return moved

    def state_dict(self) -> dict[str, Tensor]:
        return self._velocity

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, velocity in self._velocity.items():
            velocity.copy_(state[name])
