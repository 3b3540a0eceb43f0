"""AdamW that updates its buffers in place, so that a step can be captured and replayed; its moments live across rounds."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from semisfl.engine.sgd import SGD, share_within
from semisfl.engine.sums import UNREGULARISED, Regularisers
from semisfl.engine.weights import MovingAverage
from semisfl.settings.run import OptimizerConfig

BETAS, EPSILON = (0.9, 0.999), 1e-8
WARMUP_STEPS = 50
"""The learning rate rises over the first steps of a run, whose moments are still those of few batches."""


class AdamW(SGD):
    """AdamW (Loshchilov and Hutter 2019) with the interface of SGD.

    ``restart`` sets the learning rate of a phase and keeps the moments. Parameters that are working copies
    (`Weights`) are stepped through their masters. Those that a loss does not reach stay as they are.
    """

    def __init__(self, parameters: Iterable[Tensor], config: OptimizerConfig) -> None:
        self.parameters, self.config, self._streams = list(parameters), config, None
        masters = self._masters = [getattr(one, "master", one) for one in self.parameters]
        self.lr = torch.zeros((), device=masters[0].device)
        self._step = torch.zeros_like(self.lr)
        self._first, self._second = ([torch.zeros_like(one) for one in masters] for _ in range(2))
        self._steps = [torch.zeros_like(self.lr) for _ in masters]

    def followed_by(self, average: MovingAverage[Any]) -> None:
        """Leave the whole update of ``average`` to its own call after the step."""

    def restart(self, lr: float) -> None:
        """Set the learning rate of the next steps; the moments live on."""
        self.lr.fill_(lr)

    @torch.no_grad()
    def apply(
        self,
        gradients: Sequence[Tensor | None],
        clip_norm: float | None = None,
        regularisers: Regularisers = UNREGULARISED,
    ) -> None:
        """Take one step along ``gradients``, their joint norm limited to ``clip_norm``."""
        assert not any(regularisers), "regularisers are those of a client's sum"
        self._step.add_(1)
        share = 1.0 if clip_norm is None else share_within(gradients, clip_norm)
        every = zip(
            self.parameters,
            gradients,
            self._masters,
            self._first,
            self._second,
            self._steps,
            strict=True,
        )
        rows: dict[float, list[tuple[Tensor, ...]]] = {}
        for parameter, gradient, master, *state in every:
            if gradient is not None:
                there = torch.empty_like(master).copy_(gradient * share)
                rows.setdefault(self.rate(parameter), []).append((master, there, *state))
        lr = self.lr * (self._step / WARMUP_STEPS).clamp(max=1.0)
        for rate, group in rows.items():
            masters, there_, first, second, steps = (list(one) for one in zip(*group, strict=True))
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                masters,
                there_,
                first,
                second,
                [],
                steps,
                lr=lr * rate,
                beta1=BETAS[0],
                beta2=BETAS[1],
                weight_decay=self.config.weight_decay,
                eps=EPSILON,
                amsgrad=False,
                maximize=False,
            )
        for parameter, master in zip(self.parameters, self._masters, strict=True):
            if master is not parameter:
                parameter.data.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        """Return the moments and the numbers of steps, which a checkpoint holds."""
        return {"moments": [*self._first, *self._second, *self._steps, self._step]}
