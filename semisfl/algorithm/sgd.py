"""SGD whose buffers stay in place, so that a step that descends can be recorded and replayed."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from semisfl.config import OptimizerConfig


class SGD:
    """Momentum (Nesterov) SGD with weight decay on every parameter.

    ``restart`` begins a phase as a newly made optimiser would: zero momentum, a new rate.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> None:
        self.parameters = list(parameters)
        device = self.parameters[0].device
        self.lr = torch.zeros((), device=device)
        self._inner = torch.optim.SGD(
            self.parameters,
            lr=self.lr,
            momentum=config.momentum,
            nesterov=config.nesterov and config.momentum > 0,
            weight_decay=config.weight_decay,
            fused=True,
        )
        if config.momentum > 0:
            for parameter in self.parameters:
                self._inner.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def restart(self, lr: float) -> None:
        self.lr.fill_(lr)
        buffers = [state["momentum_buffer"] for state in self._inner.state.values()]
        if buffers:
            torch._foreach_zero_(buffers)

    def descend(self, loss: Tensor, also: Sequence[Tensor] = (), clip_norm: float | None = None) -> list[Tensor]:
        """One step down ``loss``; returns its gradients with respect to ``also``."""
        gradients = torch.autograd.grad(loss, [*also, *self.parameters], allow_unused=True)
        self.apply(gradients[len(also) :], clip_norm)
        return [g if g is not None else torch.zeros_like(t) for g, t in zip(gradients, also, strict=False)]

    @torch.no_grad()
    def apply(self, gradients: Sequence[Tensor | None], clip_norm: float | None = None) -> None:
        """One step along given gradients, their joint norm limited to ``clip_norm``."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None and gradient.stride() != parameter.stride():
                gradient = torch.empty_like(parameter).copy_(gradient)
            parameter.grad = gradient
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, clip_norm, foreach=True)
        self._inner.step()
        for parameter in self.parameters:
            parameter.grad = None
