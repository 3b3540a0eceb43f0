"""The teacher: an exponential moving average of the student, parameters and buffers alike."""

from typing import Generic

import torch
from torch import Tensor, nn

from semisfl.engine.weights import Module, MovingAverage, Weights, clone, weights_of


class Teacher(Generic[Module]):
    """Follows ``student``; starts as its copy, never receives gradients, always in eval mode.

    With ``warmup`` the decay of the t-th update (t = 1, 2, ...) is min(1 - 1/(t+1), decay), as in
    the published code; without, it is ``decay`` from the start, as in the paper. BatchNorm's
    running statistics are averaged with the weights; its batch counter is copied.
    """

    def __init__(self, student: Module, decay: float, warmup: bool = True) -> None:
        self.model: Module = clone(student).eval().requires_grad_(False)
        self.decay = decay
        self.warmup = warmup
        self._student = student
        source = weights_of(student)
        self.average = MovingAverage(Weights(self.model, source.dtype), source, self._next_decay)
        """For an optimiser whose every step is followed by `update`: it may do part of the work."""
        self._counters = [
            (mine, theirs)
            for mine, theirs in zip(self.model.buffers(), student.buffers(), strict=True)
            if not mine.is_floating_point()
        ]
        self.updates = torch.zeros((), device=source.master.device)

    @torch.no_grad()
    def update(self) -> None:
        """w~ <- m w~ + (1 - m) w."""
        assert weights_of(self._student) is self.average.source, "the student's weights moved"
        self.average.complete()
        for mine, theirs in self._counters:
            mine.copy_(theirs)

    def _next_decay(self) -> Tensor:
        """m of the t-th update."""
        self.updates.add_(1)
        if self.warmup:
            return (1 - 1 / (self.updates + 1)).clamp(max=self.decay)
        return torch.full_like(self.updates, self.decay)

    def state_dict(self) -> dict[str, Tensor]:
        return {
            "updates": self.updates,
            **{f"model.{k}": v for k, v in self.model.state_dict().items()},
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.updates.copy_(state["updates"])
        self.model.load_state_dict(
            {k.removeprefix("model."): v for k, v in state.items() if k != "updates"}
        )


@torch.no_grad()
def follow(target: nn.Module, source: nn.Module, decay: Tensor) -> None:
    """target <- decay target + (1 - decay) source, buffers included; counters are copied."""
    weights = [module.__dict__.get("weights") for module in (target, source)]
    copies = all(isinstance(one, Weights) for one in weights)
    if copies:
        weights_of(target).follow(weights_of(source), decay)
    mine, theirs = target.state_dict(), source.state_dict()
    for name, tensor in mine.items():
        if not tensor.is_floating_point():
            tensor.copy_(theirs[name])
        elif not copies:
            tensor.lerp_(theirs[name], 1 - decay)
