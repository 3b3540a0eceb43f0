"""Supervised-only: the server trains on its labels alone. The lower bound; nothing is ever sent."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn import functional as F

from semisfl.algorithm.schedule import learning_rate
from semisfl.algorithm.sgd import SGD
from semisfl.methods.base import Meter, ServerDropout, Setup


class Supervised:
    def __init__(self, setup: Setup) -> None:
        self.config, self.labeled, self.student = setup.config, setup.labeled, setup.model
        self.dropout = ServerDropout(setup)
        parameters = [*self.student.bottom.parameters(), *self.student.top.parameters()]
        self.sgd = SGD(parameters, setup.config.optimizer)
        self.meter = Meter(setup.hardware.device)
        self.step = setup.hardware.record(self._step)

    def round(self, round_index: int) -> dict[str, Any]:
        config = self.config
        lr = learning_rate(config.optimizer, round_index, config.rounds)
        self.dropout.start(round_index)
        self.labeled.start(round_index, config.server.steps, "weak", views=1)
        self.sgd.restart(lr)
        for _ in range(config.server.steps):
            self.step()
        loss = self.meter.read()["loss_supervised"] / config.server.steps
        return {"learning_rate": lr, "supervised_steps": config.server.steps, "loss_supervised": loss}

    def _step(self) -> None:
        images, labels = self.labeled.next()
        self.student.train()
        loss = F.cross_entropy(self.student(images).float(), labels)
        self.sgd.descend(loss)
        self.meter.add(loss_supervised=loss)

    def tested(self) -> Mapping[str, nn.Module]:
        return {"student": self.student}

    def state_dict(self) -> dict[str, Any]:
        return {"student": self.student.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.student.load_state_dict(state["student"])
