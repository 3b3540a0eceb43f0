"""The teacher: an exponential moving average of the student, parameters and buffers alike."""

from collections.abc import Sequence
from typing import Generic

import torch
from torch import Tensor, nn

from semisfl.engine.weights import Following, Home, Module, Weights, clone, weights_of


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
        self._source = weights_of(student)
        self._target = Weights(self.model, self._source.dtype)
        self._counters = [
            (mine, theirs)
            for mine, theirs in zip(self.model.buffers(), student.buffers(), strict=True)
            if not mine.is_floating_point()
        ]
        self.updates = torch.zeros((), device=self._target.master.device)

    @torch.no_grad()
    def update(self) -> None:
        """w~ <- m w~ + (1 - m) w."""
        self._target.follow(self._source, self._decay_of_next())
        self._copy_counters()

    @torch.no_grad()
    def follow_along(self, stepped: Sequence[Home]) -> Following:
        """Begin an `update` in which every working copy of the student is followed as it is stepped."""
        assert stepped[0].weights is self._source and stepped[0].start == 0
        assert self._source.work is not None and stepped[-1].stop == self._source.work.numel()
        return Following(self._target, self._decay_of_next())

    @torch.no_grad()
    def follow_rest(self, following: Following) -> None:
        """End it: what has no working copy."""
        rest = self._target.uncopied
        if rest.numel():
            rest.lerp_(self._source.uncopied, 1 - following.keep)
        self._copy_counters()

    def _decay_of_next(self) -> Tensor:
        assert weights_of(self._student) is self._source, "the student's weights moved elsewhere"
        self.updates.add_(1)
        if self.warmup:
            return (1 - 1 / (self.updates + 1)).clamp(max=self.decay)
        return torch.full_like(self.updates, self.decay)

    def _copy_counters(self) -> None:
        for mine, theirs in self._counters:
            mine.copy_(theirs)

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
def follow(target: nn.Module, source: nn.Module, keep: Tensor) -> None:
    """target <- keep target + (1 - keep) source, buffers included; counters are copied."""
    mine, theirs = target.state_dict(), source.state_dict()
    for name, tensor in mine.items():
        if tensor.is_floating_point():
            tensor.lerp_(theirs[name], 1 - keep)
        else:
            tensor.copy_(theirs[name])
