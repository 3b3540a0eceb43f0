"""SGD that updates its buffers in place, so that a step can be captured and replayed.

Parameters come in two kinds. *Plain* ones are stepped by PyTorch's fused operation. *Working copies*
(`weights.Weights`) are stepped through their full-precision masters by `kernels.sgd_step`: one by one
during the backward pass, or all in one launch from gradients copied side by side.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import compress, groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from semisfl.engine.kernels import sgd_step
from semisfl.engine.streams import Streams
from semisfl.engine.sums import UNREGULARISED, Regularisers
from semisfl.engine.weights import ALIGNMENT, Home, MovingAverage, as_flat
from semisfl.settings.run import OptimizerConfig

# Up to this many kernel launches per step cost less than copying the gradients into one tensor.
MOST_LAUNCHES = 32


class SGD:
    """Momentum (Nesterov) SGD with weight decay on every parameter.

    ``restart`` begins a phase as a new optimiser would: zero momentum, a new learning rate.
    Parameters that are working copies (`Weights`) are stepped through their masters, in one pass. Those
    that a loss does not reach decay all the same; other parameters then stay as they are, as in PyTorch.
    On a GPU and with ``streams`` each is stepped as soon as its gradient is there, on the side
    stream, while the backward pass goes on.
    """

    lasting = False
    """Whether `restart` keeps the momentum, which is then part of the run's state."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        config: OptimizerConfig,
        streams: Streams | None = None,
    ) -> None:
        """Take the ``parameters`` and momentum and weight decay of ``config``; the learning rate comes with `restart`.

        Without ``streams`` every step follows the whole backward pass.
        """
        self.parameters = list(parameters)
        self.config = config
        self._streams = streams
        self._average: MovingAverage[Any] | None = None
        self.lr = torch.zeros((), device=self.parameters[0].device)
        self._copies = [p for p in self.parameters if hasattr(p, "home")]
        self._plain = [p for p in self.parameters if not hasattr(p, "home")]
        self._momenta: list[Tensor] = []
        if self._copies:
            self._homes: list[Home] = [p.home for p in self._copies]
            self._rates = {p.home.start: self.rate(p) for p in self._copies}
            self._weights = self._homes[0].weights
            self._momentum = torch.zeros(_room(self._homes), device=self.lr.device)
            self._momenta.append(self._momentum)
            largest = max(ALIGNMENT, *(p.numel() for p in self._copies))
            self._zeros = torch.zeros(largest, device=self.lr.device, dtype=self._weights.dtype)
        self._plain_rows = self._plain
        if any(hasattr(p, "slots") for p in self._plain):
            self._plain_rows = [row for p in self._plain for row in _slots(p, p) if row is not None]
        self._plain_momenta = [torch.zeros_like(p) for p in self._plain_rows if config.momentum > 0]
        self._momenta += self._plain_momenta

    def followed_by(self, average: MovingAverage[Any]) -> None:
        """Expect an update of ``average`` after every step; part of it is then done within the step."""
        self._average = average

    def rate(self, parameter: Tensor) -> float:
        """Return the parameter's share of the learning rate: layers marked as ``pretrained`` have one of their own."""
        return self.config.pretrained_share if getattr(parameter, "pretrained", False) else 1.0

    @property
    def _one_by_one(self) -> bool:
        """Return whether each working copy is stepped alone: few large ones, or those of a stack."""
        few = self.lr.is_cuda and len(self._copies) <= MOST_LAUNCHES
        return bool(self._copies) and (few or self._homes[0].rows > 1)

    def restart(self, lr: float) -> None:
        """Begin a phase: set the learning rate, and the momentum to zero unless it is ``lasting``."""
        self.lr.fill_(lr)
        if self._momenta and not self.lasting:
            torch._foreach_zero_(self._momenta)

    def state_dict(self) -> dict[str, Any]:
        """Return the moments, which a checkpoint holds."""
        return {"moments": self._momenta}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy what `state_dict` returned into the buffers, which captured steps read."""
        for mine, theirs in zip(self.state_dict()["moments"], state["moments"], strict=True):
            mine.copy_(theirs)

    def descend(
        self,
        loss: Tensor,
        also: Sequence[Tensor] = (),
        clip_norm: float | None = None,
        gradient: Tensor | None = None,
        regularisers: Regularisers = UNREGULARISED,
    ) -> list[Tensor]:
        """Take one step down ``loss`` plus the ``regularisers`` of a sum; return the gradients of ``also``.

        ``also``: tensors that are not stepped, such as features; one that the loss does not reach has a
        gradient of zeros. ``clip_norm``: the largest norm of all gradients together. ``gradient``: the gradient
        of ``loss`` itself, if it is not a single number.
        """
        leaves = [*also, *self.parameters]
        gradients: tuple[Tensor | None, ...]
        at_once = clip_norm is not None or any(regularisers)
        if self._streams is None or at_once or not (self.lr.is_cuda and self._one_by_one):
            gradients = torch.autograd.grad(loss, leaves, gradient, allow_unused=True)
            self.apply(gradients[len(also) :], clip_norm, regularisers)
        else:
            gradients = self._descend_early(self._streams, loss, leaves, gradient)
        return [
            g if g is not None else torch.zeros_like(t)
            for g, t in zip(gradients, also, strict=False)
        ]

    def _descend_early(
        self, streams: Streams, loss: Tensor, leaves: Sequence[Tensor], gradient: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Step every working copy in a hook, and the moving average's values with it; return all gradients."""
        if self._average is not None:
            self._average.begin(self._homes, streams.side)

        def step(home: Home, gradient: Tensor) -> None:
            with streams.side(gradient), torch.no_grad():
                self._step_rows(home, as_flat(gradient), self._average)

        copies = list(zip(self._copies, self._homes, strict=True))
        hooks = [parameter.register_hook(partial(step, home)) for parameter, home in copies]
        try:
            gradients = torch.autograd.grad(loss, leaves, gradient, allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()
        by_parameter = dict(zip(map(id, leaves), gradients, strict=True))
        for parameter, home in copies:
            if by_parameter[id(parameter)] is None:
                step(home, self._flat(home, None))
        if self._plain:
            self._step_plain([by_parameter[id(p)] for p in self._plain])
        return gradients

    @torch.no_grad()
    def apply(
        self,
        gradients: Sequence[Tensor | None],
        clip_norm: float | None = None,
        regularisers: Regularisers = UNREGULARISED,
    ) -> None:
        """Take one step along ``gradients``, one per parameter, their joint norm limited to ``clip_norm``.

        None: the loss does not reach this parameter.
        """
        summed = bool(self._copies) and self._weights.base is not None
        assert summed or not any(regularisers), "regularisers are those of a sum"
        by_parameter = dict(zip(map(id, self.parameters), gradients, strict=True))
        share = None if clip_norm is None else share_within(gradients, clip_norm)
        if self._copies:
            self._step_copies([by_parameter[id(p)] for p in self._copies], share, regularisers)
        if self._plain:
            plain = [by_parameter[id(p)] for p in self._plain]
            if share is not None:
                plain = [None if g is None else g * share.to(g.dtype) for g in plain]
            self._step_plain(plain)

    def _step_copies(
        self, gradients: list[Tensor | None], share: Tensor | None, regularisers: Regularisers
    ) -> None:
        """Step along ``share`` times the gradients: one by one, or copied into one tensor."""
        if self._one_by_one:
            for home, gradient in zip(self._homes, gradients, strict=True):
                self._step_rows(home, self._flat(home, gradient), None, share, regularisers)
            return
        together = zip(self._homes, gradients, strict=True)
        for _, group in groupby(together, lambda pair: self._rates[pair[0].start]):
            homes, parts = [], []
            for home, gradient in group:
                homes.append(home)
                parts += [
                    self._flat(home, gradient),
                    self._zeros[: home.stop - home.start - home.size],
                ]
            span = Home(self._weights, homes[0].start, homes[-1].stop - homes[0].start)
            self._step_rows(span, torch.cat(parts), None, share, regularisers)

    def _flat(self, home: Home, gradient: Tensor | None) -> Tensor:
        """Return a parameter's gradient in flat order; zero if it was not used: momentum and decay go on."""
        return self._zeros[: home.rows * home.size] if gradient is None else as_flat(gradient)

    def _step_rows(
        self,
        home: Home,
        gradient: Tensor,
        average: MovingAverage[Any] | None,
        share: Tensor | None = None,
        regularisers: Regularisers = UNREGULARISED,
    ) -> None:
        """Step the rows of ``home`` along ``share`` times the gradient, and move an average along with them."""
        assert self._weights.work is not None
        config, base = self.config, self._weights.base
        rate = self._rates[home.start]
        if rate != 1:  # a share of gradient and decay is that share of the learning rate
            share = torch.full_like(self.lr, rate) if share is None else share * rate
        sgd_step(
            home.of(self._weights.master),
            home.of(self._weights.work),
            home._replace(start=home.start - self._homes[0].start).of(self._momentum),
            gradient,
            self.lr,
            config.weight_decay * rate,
            config.momentum,
            config.momentum > 0,  # Nesterov's form, as in the authors' code
            *(average.along(home) if average is not None else ()),
            scale=share,
            base=None if base is None else home.of(base),
            **regularisers._asdict(),
        )

    @torch.no_grad()
    def _step_plain(self, gradients: list[Tensor | None]) -> None:
        """Step as `torch.optim.SGD(fused=True)` does, whose bookkeeping costs more than a small model's step."""
        if self._plain_rows is not self._plain:
            gradients = [
                row for p, g in zip(self._plain, gradients, strict=True) for row in _slots(p, g)
            ]
        rates = [
            None if g is None else self.rate(p)
            for p, g in zip(self._plain_rows, gradients, strict=True)
        ]
        for rate in sorted({one for one in rates if one is not None}):
            used = [one == rate for one in rates]
            parameters = list(compress(self._plain_rows, used))
            there = [
                g if g.stride() == p.stride() else torch.empty_like(p).copy_(g)
                for p, g in zip(parameters, compress(gradients, used), strict=True)
                if g is not None
            ]
            momenta = list(compress(self._plain_momenta, used))
            torch._fused_sgd_(
                parameters,
                there,
                momenta,
                weight_decay=self.config.weight_decay,
                momentum=self.config.momentum,
                lr=self.lr if rate == 1 else self.lr * rate,
                dampening=0.0,
                nesterov=self.config.momentum > 0,
                maximize=False,
                is_first_step=False,
            )


def share_within(gradients: Sequence[Tensor | None], clip_norm: float) -> Tensor:
    """Return the share of the gradients that keeps their joint norm within ``clip_norm``."""
    there = [gradient for gradient in gradients if gradient is not None]
    norm = torch.stack(torch._foreach_norm(there, dtype=torch.float32)).norm()
    return (clip_norm / (norm + 1e-6)).clamp(max=1.0)


def _slots(parameter: Tensor, value: Tensor | None) -> Sequence[Tensor | None]:
    """Return ``value`` slot by slot if ``parameter`` is a stack's, as a step needs contiguous values."""
    if not hasattr(parameter, "slots"):
        return (value,)
    return (None,) * len(parameter) if value is None else value.detach().unbind()


def _room(homes: list[Home]) -> int:
    """Return the number of values that the working copies span; they must be stored side by side."""
    for before, after in pairwise(homes):
        assert after.weights is before.weights and after.start == before.stop, (
            "an optimiser's working copies must be stored side by side"
        )
    return homes[-1].stop - homes[0].start + max((h.rows - 1) * h.stride for h in homes)
