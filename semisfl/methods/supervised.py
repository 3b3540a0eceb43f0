"""Supervised-only: the server trains on its labels alone. The lower bound; nothing is ever sent.

The moving average of the weights is tested beside them, because other methods test a teacher.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from semisfl.algorithm.schedule import learning_rate
from semisfl.algorithm.teacher import Teacher
from semisfl.methods.base import Setup
from semisfl.methods.full_model import SupervisedPhase
from semisfl.metrics import MethodMetrics


class Supervised:
    """The server alone: SGD steps on labelled images and a moving average of the weights."""

    def __init__(self, setup: Setup) -> None:
        config = self.config = setup.config
        self.student = setup.hardware.working_copy(setup.model.whole())
        self.ema = Teacher(self.student, config.teacher.ema_decay, config.teacher.warmup)
        self.supervised = SupervisedPhase(setup, self.student, ema=self.ema)

    def round(self, round_index: int) -> MethodMetrics:
        """Take ``server.steps`` supervised steps."""
        config = self.config
        lr = learning_rate(config.optimizer, round_index, config.rounds)
        loss = self.supervised.run(round_index, config.server.steps, lr)
        return MethodMetrics(
            learning_rate=lr, supervised_steps=config.server.steps, loss_supervised=loss
        )

    def tested(self) -> Mapping[str, nn.Module]:
        """Return the trained model, which is the result, and its moving average."""
        return {"student": self.student, "teacher": self.ema.model}

    def state_dict(self) -> dict[str, Any]:
        """Return the model and the moving average of its weights."""
        return {"student": self.student.state_dict(), "teacher": self.ema.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the state of a checkpoint."""
        self.student.load_state_dict(state["student"])
        self.ema.load_state_dict(state["teacher"])
