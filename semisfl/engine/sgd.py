"""SGD whose buffers stay in place, so that a step that descends can be recorded and replayed."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import compress, pairwise
from typing import Any

import torch
from torch import Tensor

from semisfl.algorithm.teacher import Teacher
from semisfl.config import OptimizerConfig
from semisfl.engine.kernels import fused
from semisfl.engine.weights import ALIGNMENT, Following, Home, as_flat

Aside = Callable[..., AbstractContextManager[None]]
# Up to so many kernel launches a step cost less than copying the gradients together.
MOST_LAUNCHES = 32


class SGD:
    """Momentum (Nesterov) SGD with weight decay on every parameter.

    ``restart`` begins a phase as a newly made optimiser would: zero momentum, a new rate.
    Parameters that are working copies (`Weights`) are stepped through their masters, in one pass;
    on a GPU and with ``aside`` (`Hardware.aside`) each as soon as its gradient is there, beside the
    rest of the backward pass.
    """

    def __init__(
        self, parameters: Iterable[Tensor], config: OptimizerConfig, aside: Aside | None = None
    ) -> None:
        self.parameters = list(parameters)
        self.config = config
        self._aside = aside
        self.lr = torch.zeros((), device=self.parameters[0].device)
        self._copies = [p for p in self.parameters if hasattr(p, "home")]
        self._plain = [p for p in self.parameters if not hasattr(p, "home")]
        self._momenta: list[Tensor] = []
        if self._copies:
            self._homes: list[Home] = [p.home for p in self._copies]
            self._weights = self._homes[0].weights
            self._momentum = torch.zeros(_room(self._homes), device=self.lr.device)
            self._momenta.append(self._momentum)
            largest = max(ALIGNMENT, *(p.numel() for p in self._copies))
            self._zeros = torch.zeros(largest, device=self.lr.device, dtype=self._weights.dtype)
        self._speeds = [torch.zeros_like(p) for p in self._plain if config.momentum > 0]
        self._momenta += self._speeds

    @property
    def _one_by_one(self) -> bool:
        """Whether working copies are stepped each for itself: few large ones, or those of a stack."""
        few = self.lr.is_cuda and len(self._copies) <= MOST_LAUNCHES
        return bool(self._copies) and (few or self._homes[0].rows > 1)

    def restart(self, lr: float) -> None:
        self.lr.fill_(lr)
        if self._momenta:
            torch._foreach_zero_(self._momenta)

    def descend(
        self,
        loss: Tensor,
        also: Sequence[Tensor] = (),
        clip_norm: float | None = None,
        followed_by: Teacher[Any] | None = None,
        slope: Tensor | None = None,
    ) -> list[Tensor]:
        """One step down ``loss``, and one of the teacher; returns the gradients of ``also``.

        ``slope``: what ``loss`` is multiplied with if it is not a single number.
        """
        gradients: tuple[Tensor | None, ...]
        late = self._aside is None or clip_norm is not None
        if late or not self.lr.is_cuda or not self._one_by_one:
            leaves = [*also, *self.parameters]
            gradients = torch.autograd.grad(loss, leaves, slope, allow_unused=True)
            self.apply(gradients[len(also) :], clip_norm)
            if followed_by is not None:
                followed_by.update()
        else:
            gradients = self._descend_early(loss, also, followed_by, slope)
        return [
            g if g is not None else torch.zeros_like(t)
            for g, t in zip(gradients, also, strict=False)
        ]

    def _descend_early(
        self,
        loss: Tensor,
        also: Sequence[Tensor],
        teacher: Teacher[Any] | None,
        slope: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """Every working copy is stepped by a hook; the teacher's values are moved along with it."""
        following, aside = None, self._aside
        assert aside is not None
        if teacher is not None:
            with aside():
                following = teacher.follow_along(self._homes)

        def step(home: Home, gradient: Tensor) -> None:
            with aside(gradient), torch.no_grad():
                self._step_rows(home, as_flat(gradient), following)

        copies = zip(self._copies, self._homes, strict=True)
        hooks = [parameter.register_hook(partial(step, home)) for parameter, home in copies]
        try:
            leaves = [*also, *self.parameters]
            gradients = torch.autograd.grad(loss, leaves, slope, allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()
        by_parameter = dict(zip(map(id, self.parameters), gradients[len(also) :], strict=True))
        for parameter, home in zip(self._copies, self._homes, strict=True):
            if by_parameter[id(parameter)] is None:
                step(home, self._flat(home, None))
        if self._plain:
            self._step_plain([by_parameter[id(p)] for p in self._plain])
        if teacher is not None and following is not None:
            with aside():
                teacher.follow_rest(following)
        return gradients

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
        """One by one, or laid side by side."""
        if self._one_by_one:
            for home, given in zip(self._homes, gradients, strict=True):
                self._step_rows(home, self._flat(home, given))
            return
        parts: list[Tensor] = []
        for home, given in zip(self._homes, gradients, strict=True):
            parts.append(self._flat(home, given))
            parts.append(self._zeros[: home.stop - home.start - home.size])
        first, last = self._homes[0], self._homes[-1]
        whole = Home(self._weights, first.start, last.stop - first.start)
        self._step_rows(whole, torch.cat(parts))

    def _flat(self, home: Home, gradient: Tensor | None) -> Tensor:
        """Of a parameter that was not used it is zero: momentum and decay go on."""
        return self._zeros[: home.rows * home.size] if gradient is None else as_flat(gradient)

    def _step_rows(self, home: Home, gradient: Tensor, following: Following | None = None) -> None:
        assert self._weights.work is not None
        master, work = home.of(self._weights.master), home.of(self._weights.work)
        momentum = home._replace(start=home.start - self._homes[0].start).of(self._momentum)
        config, along = self.config, following and following.of(home)
        if master.is_cuda:
            fused().sgd(master, work, momentum, gradient, self.lr, config, along)
            return
        gradient = gradient.view_as(master).float() + config.weight_decay * master
        momentum.mul_(config.momentum).add_(gradient)
        master.sub_(
            self.lr * (gradient + config.momentum * momentum if config.nesterov else momentum)
        )
        work.copy_(master)
        if along:
            teachers, copies, keep = along
            teachers.lerp_(master, 1 - keep)
            copies.copy_(teachers)

    @torch.no_grad()
    def _step_plain(self, gradients: list[Tensor | None]) -> None:
        """As `torch.optim.SGD` does; around small models its bookkeeping costs more than the step."""
        used = [gradient is not None for gradient in gradients]
        given = [
            g if g.stride() == p.stride() else torch.empty_like(p).copy_(g)
            for p, g in zip(self._plain, gradients, strict=True)
            if g is not None
        ]
        if not given:
            return
        torch._fused_sgd_(
            list(compress(self._plain, used)),
            given,
            list(compress(self._speeds, used)),
            weight_decay=self.config.weight_decay,
            momentum=self.config.momentum,
            lr=self.lr,
            dampening=0.0,
            nesterov=self.config.nesterov and self.config.momentum > 0,
            maximize=False,
            is_first_step=False,
        )


def _room(homes: list[Home]) -> int:
    """How far the values of working copies reach, which must lie side by side."""
    for before, after in pairwise(homes):
        assert after.weights is before.weights and after.start == before.stop, (
            "an optimiser's working copies must lie side by side"
        )
    return homes[-1].stop - homes[0].start + max((h.rows - 1) * h.apart for h in homes)
