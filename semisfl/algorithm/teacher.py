"""The teacher: an exponential moving average of the student, parameters and buffers alike."""

from typing import Generic

import torch
from torch import Tensor

from semisfl.engine.sgd import SGD
from semisfl.engine.weights import Module, MovingAverage


class Teacher(Generic[Module]):
    """Follow ``student``: start as its copy, receive no gradients, stay in eval mode.

    With ``warmup`` the decay of the t-th update (t = 1, 2, ...) is min(1 - 1/(t+1), decay), as in
    the published code. Without, it is ``decay`` from the start, as in the paper. BatchNorm's
    running statistics are averaged with the weights; its batch counter is copied.
    """

    def __init__(self, student: Module, decay: float, warmup: bool = True) -> None:
        """Copy ``student`` as the teacher's first weights; ``decay`` is gamma, the EMA decay in 0..1."""
        self.decay, self.warmup = decay, warmup
        self._average = MovingAverage(student, self._next_decay)
        self.model: Module = self._average.model
        self.updates = torch.zeros((), device=next(self.model.parameters()).device)

    def pair_with(self, sgd: SGD) -> None:
        """Declare that an `update` follows every step of ``sgd``: the engine may compute both in one pass."""
        sgd.followed_by(self._average)

    def update(self) -> None:
        """Set w~ <- m w~ + (1 - m) w."""
        self._average.update()

    def _next_decay(self) -> Tensor:
        """Return m of the next update."""
        self.updates.add_(1)
        if self.warmup:
            return (1 - 1 / (self.updates + 1)).clamp(max=self.decay)
        return torch.full_like(self.updates, self.decay)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the teacher's weights and the number of updates, on which its decay depends."""
        return {
            "updates": self.updates,
            **{f"model.{k}": v for k, v in self.model.state_dict().items()},
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from the weights and the number of updates of a checkpoint."""
        self.updates.copy_(state["updates"])
        self.model.load_state_dict(
            {k.removeprefix("model."): v for k, v in state.items() if k != "updates"}
        )
