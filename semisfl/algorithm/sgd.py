"""SGD whose buffers stay in place, so that a step that descends can be recorded and replayed."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from semisfl.algorithm.weights import ALIGNMENT, Weights, as_flat, kernels, padded
from semisfl.config import OptimizerConfig

# Up to so many kernel launches a step cost less than copying the gradients together.
MOST_LAUNCHES = 32


class SGD:
    """Momentum (Nesterov) SGD with weight decay on every parameter.

    ``restart`` begins a phase as a newly made optimiser would: zero momentum, a new rate.
    Parameters that are working copies (`Weights`) are stepped through their masters, in one pass.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> None:
        self.parameters = list(parameters)
        self.config = config
        self.lr = torch.zeros((), device=self.parameters[0].device)
        self._copies = [p for p in self.parameters if hasattr(p, "home")]
        self._plain = [p for p in self.parameters if not hasattr(p, "home")]
        self._momenta: list[Tensor] = []
        if self._copies:
            self._weights, self._start, self._stop = _range(self._copies)
            self._momentum = torch.zeros_like(self._weights.master[self._start : self._stop])
            self._momenta.append(self._momentum)
            largest = max(ALIGNMENT, *(p.numel() for p in self._copies))
            self._zeros = torch.zeros(largest, device=self.lr.device, dtype=self._weights.dtype)
        if self._plain:
            self._inner = torch.optim.SGD(
                self._plain,
                lr=self.lr,
                momentum=config.momentum,
                nesterov=config.nesterov and config.momentum > 0,
                weight_decay=config.weight_decay,
                fused=True,
            )
            if config.momentum > 0:
                for parameter in self._plain:
                    self._inner.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
                    self._momenta.append(self._inner.state[parameter]["momentum_buffer"])

    def restart(self, lr: float) -> None:
        self.lr.fill_(lr)
        if self._momenta:
            torch._foreach_zero_(self._momenta)

    def descend(
        self, loss: Tensor, also: Sequence[Tensor] = (), clip_norm: float | None = None
    ) -> list[Tensor]:
        """One step down ``loss``; returns its gradients with respect to ``also``."""
        gradients = torch.autograd.grad(loss, [*also, *self.parameters], allow_unused=True)
        self.apply(gradients[len(also) :], clip_norm)
        return [
            g if g is not None else torch.zeros_like(t)
            for g, t in zip(gradients, also, strict=False)
        ]

    @torch.no_grad()
    def apply(self, gradients: Sequence[Tensor | None], clip_norm: float | None = None) -> None:
        """One step along given gradients, their joint norm limited to ``clip_norm``."""
        by_parameter = dict(zip(map(id, self.parameters), gradients, strict=True))
        if clip_norm is not None:
            given = [gradient for gradient in gradients if gradient is not None]
            norm = torch.stack([part.float() for part in torch._foreach_norm(given)]).norm()
            share = (clip_norm / (norm + 1e-6)).clamp(max=1.0)
            by_parameter = {
                key: None if g is None else g * share.to(g.dtype) for key, g in by_parameter.items()
            }
        if self._copies:
            self._step_copies([by_parameter[id(p)] for p in self._copies])
        if self._plain:
            self._step_plain([by_parameter[id(p)] for p in self._plain])

    def _step_copies(self, gradients: list[Tensor | None]) -> None:
        """Few, large parameters one by one; many small ones (a stack of clients) laid side by side."""
        if self._momentum.is_cuda and len(self._copies) <= MOST_LAUNCHES:
            start = self._start
            for parameter, given in zip(self._copies, gradients, strict=True):
                size = parameter.numel()
                self._step_range(
                    start, start + size, self._zeros[:size] if given is None else as_flat(given)
                )
                start += padded(parameter)
            return
        parts: list[Tensor] = []
        for parameter, given in zip(self._copies, gradients, strict=True):
            parts.append(self._zeros[: parameter.numel()] if given is None else as_flat(given))
            if padded(parameter) > parameter.numel():
                parts.append(self._zeros[: padded(parameter) - parameter.numel()])
        self._step_range(self._start, self._stop, torch.cat(parts))

    def _step_range(self, start: int, stop: int, gradient: Tensor) -> None:
        assert self._weights.work is not None
        master, work = self._weights.master[start:stop], self._weights.work[start:stop]
        momentum = self._momentum[start - self._start : stop - self._start]
        config = self.config
        if master.is_cuda:
            kernels().sgd(master, work, momentum, gradient, self.lr, config)
            return
        gradient = gradient.float() + config.weight_decay * master
        momentum.mul_(config.momentum).add_(gradient)
        master.sub_(
            self.lr * (gradient + config.momentum * momentum if config.nesterov else momentum)
        )
        work.copy_(master)

    def _step_plain(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self._plain, gradients, strict=True):
            if gradient is not None and gradient.stride() != parameter.stride():
                gradient = torch.empty_like(parameter).copy_(gradient)
            parameter.grad = gradient
        self._inner.step()
        for parameter in self._plain:
            parameter.grad = None


def _range(copies: list[nn.Parameter]) -> tuple[Weights, int, int]:
    """The stretch of one `Weights` that the working copies fill, in order."""
    weights, first = copies[0].home  # type: ignore[attr-defined]
    stop = first
    for parameter in copies:
        home, start = parameter.home  # type: ignore[attr-defined]
        assert home is weights and start == stop, (
            "an optimiser's working copies must lie side by side"
        )
        stop = start + padded(parameter)
    return weights, first, stop
