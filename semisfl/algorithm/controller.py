"""Set the number of supervised steps in a round: K_s of Eq. (8), adapted to how fast the two losses fall."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from semisfl.settings.run import ControllerConfig

# The published code asks for this much more progress of the semi-supervised loss.
MARGIN = 1e-5
# A period has ten windows, as in the published code: 100 rounds in windows of 10.
WINDOWS = 10


@dataclass
class _Round:
    supervised: float
    semi: float
    lr: float
    supervised_steps: int
    cross_entity_steps: int


class Controller:
    """Lower ``supervised_steps`` by ``step_decay`` when the semi-supervised loss falls faster.

    ``normalised`` [published code]: every ``period`` rounds, over differences of means of ten
    windows, divided by learning rate and steps; K_s <- round(max(K_s / alpha, K_min)).
    ``raw``, as the paper's Algorithm 1 has it: after every round, over plain differences;
    K_s <- max(floor(K_s / alpha), floor(K_min)).
    ``fixed``: never. In all, K_s never rises: a K_min above the first K_s leaves it as it is.
    """

    def __init__(
        self,
        config: ControllerConfig,
        supervised_steps: int,
        cross_entity_steps: int,
        labeled_share: Callable[[], float],
    ) -> None:
        """Begin with ``supervised_steps`` K_s and ``cross_entity_steps`` K_u.

        ``labeled_share`` returns |D_l| / |D| as known by now: clients may still join.
        """
        self.config = config
        self.supervised_steps = supervised_steps
        self.cross_entity_steps = cross_entity_steps
        self._labeled_share = labeled_share
        self._window = max(1, config.period // WINDOWS)
        self.semi_faster_share = 0.0
        self._rounds: list[_Round] = []
        self._seen = 0

    @property
    def min_supervised_steps(self) -> float:
        """Return K_min."""
        factor = self.config.min_steps_factor
        return factor * self.cross_entity_steps * self._labeled_share()

    def observe(self, supervised: float, semi: float, lr: float) -> None:
        """Take in a round's mean losses f_s and f_u and its learning rate, and set the next round's steps.

        ``supervised`` is f_s, ``semi`` is f_u. The result is in ``supervised_steps``; it never rises.
        """
        if self.config.kind == "fixed":
            return
        self._rounds.append(
            _Round(supervised, semi, lr, self.supervised_steps, self.cross_entity_steps)
        )
        self._seen += 1
        # Ten differences need eleven whole windows, and `raw` decides inside the twelfth too.
        del self._rounds[: -(self.config.period + 2 * self._window)]
        {"normalised": self._decide_normalised, "raw": self._decide_raw}[self.config.kind]()

    def _decide_normalised(self) -> None:
        if self._seen % self.config.period:
            return
        semi_fell_faster = self._fall("semi", "cross_entity_steps") - self._fall(
            "supervised", "supervised_steps"
        )
        self.semi_faster_share = float(np.mean(semi_fell_faster >= MARGIN))
        if self.semi_faster_share >= 0.5:
            self._lower(round(self._next_steps))

    def _decide_raw(self) -> None:
        # R_h is over ten differences (period / window), so over eleven windows. Whole ones only,
        # counted from round 0, so that a mean does not change once it is formed.
        if self._seen < self.config.period + self._window:
            return
        semi_fell_faster = self._fall("semi") > self._fall("supervised")
        self.semi_faster_share = float(np.mean(semi_fell_faster))
        if self.semi_faster_share >= 0.5:
            # Without the small number, the floor of 33 / 1.1 would be 29.
            self._lower(math.floor(self._next_steps + 1e-9))

    @property
    def _next_steps(self) -> float:
        """Return the next K_s, not yet a whole number."""
        return max(self.supervised_steps / self.config.step_decay, self.min_supervised_steps)

    def _lower(self, steps: int) -> None:
        self.supervised_steps = max(1, min(self.supervised_steps, steps))

    def _means(self, name: str) -> np.ndarray:
        """Return the mean of a `_Round` field per whole window, the last period's and the one before."""
        window = self._window
        complete = self._rounds[: len(self._rounds) - self._seen % window]
        values = np.array([getattr(item, name) for item in complete])
        values = values[len(values) % window :]
        return values.reshape(-1, window).mean(1)[-(self.config.period // window + 1) :]

    def _fall(self, loss: str, steps: str | None = None) -> np.ndarray:
        """Return previous minus next, per window; per unit of learning rate and step if ``steps`` is named."""
        means = self._means(loss)
        fall = means[:-1] - means[1:]
        if steps is not None:
            fall = fall / self._means("lr")[:-1] / self._means(steps)[:-1]
        return fall

    def state_dict(self) -> dict[str, Any]:
        """Return the steps and the losses that the next decision needs, for a checkpoint."""
        return {
            "supervised_steps": self.supervised_steps,
            "semi_faster_share": self.semi_faster_share,
            "seen": self._seen,
            "rounds": [list(vars(item).values()) for item in self._rounds],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the steps and losses of a checkpoint."""
        self.supervised_steps = int(state["supervised_steps"])
        self.semi_faster_share = float(state["semi_faster_share"])
        self._seen = int(state["seen"])
        self._rounds = [_Round(a, b, c, int(d), int(e)) for a, b, c, d, e in state["rounds"]]
