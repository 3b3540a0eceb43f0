"""FedSwitch: an EMA teacher on the server; each client lets it or its own student give the labels.

A reconstruction: the full paper could not be obtained and there is no public code. Its abstract
gives the EMA teacher, local adaptation, the adaptive switch and the "IIDness" threshold; the
switching rule (a divergence from uniform) and all numbers are ours. FedSwitch-SL: `fedswitch_sl.py`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from semisfl.algorithm.losses import consistency, pseudo_label
from semisfl.algorithm.schedule import learning_rate
from semisfl.algorithm.teacher import Teacher
from semisfl.engine.weights import follow
from semisfl.fleet.base import Answers, ClientRuntime, FullRound, State, every_tensor
from semisfl.methods.base import Setup
from semisfl.methods.fedswitch_settings import FedSwitchSettings
from semisfl.methods.full_model import (
    COUNTED,
    SupervisedPhase,
    combine_results,
    count_labels,
    count_loss,
    read_counter,
    report,
    required_state,
    start_counter,
)
from semisfl.metrics import MethodMetrics
from semisfl.settings.config import ConfigError
from semisfl.settings.sections import needed_confidence


def divergence(mean: Tensor) -> Tensor:
    """Return D = KL(mean prediction || uniform) = sum_c p_c log(M p_c).

    ``mean`` [..., M] holds mean predictions over M classes. 0 looks IID, log M is a single class.
    """
    return torch.special.xlogy(mean, mean.shape[-1] * mean).sum(-1)


class FedSwitch:
    """The server's half: supervised steps with an EMA teacher, then the mean of the clients' students."""

    def __init__(self, setup: Setup) -> None:
        config, self.setup = setup.config, setup
        self.settings = config.settings(FedSwitchSettings)
        if self.settings.align != "none":
            raise ConfigError(
                f"fedswitch.align = {self.settings.align!r} needs labels that the server gives: use "
                "method = 'fedswitch-sl', or align = 'none'"
            )
        self.student = setup.hardware.working_copy(setup.model.whole())
        self.ema = Teacher(self.student, config.teacher.ema_decay, config.teacher.warmup)
        self.supervised = SupervisedPhase(setup, self.student, ema=self.ema)
        self.work = FedSwitchWork()

    def round(self, round_index: int) -> MethodMetrics:
        """Take the supervised steps and, after the first ``pretrain_rounds``, let the active clients train."""
        config = self.setup.config
        lr = learning_rate(config.optimizer, round_index, config.rounds)
        # 1. Supervised steps on the student; the teacher follows each. It changes nowhere else.
        loss = self.supervised.run(round_index, config.server.steps, lr)
        metrics = MethodMetrics(
            learning_rate=lr, supervised_steps=config.server.steps, loss_supervised=loss
        )
        if round_index < config.server.pretrain_rounds:
            return metrics
        # 2-4. Every client is sent the student, and the teacher if it asks for it, and trains.
        plan = FullRound(
            round_index,
            self.setup.active(round_index),
            config.clients.steps,
            lr,
            send={"student": self.student.state_dict()},
            on_request={"teacher": self.ema.model.state_dict()},
            kinds={"teacher": "teacher"},
            settings={
                "confidence_threshold": self.settings.confidence_threshold,
                "iid_threshold": self.settings.iid_threshold,
                "ema_decay": config.teacher.ema_decay,
            },
        )
        results = self.setup.fleet.train(self.work, plan)
        # The mean of the students, plain unless the run says otherwise.
        sent = plan.send["student"]
        self.student.load_state_dict(combine_results(self.setup, results, "student", sent))
        by_teacher = sum(result.numbers["by_teacher"] for result in results) / len(results)
        return replace(metrics, **report(results), labelled_by_teacher=by_teacher)

    def tested(self) -> Mapping[str, nn.Module]:
        """Return teacher and student."""
        return {"teacher": self.ema.model, "student": self.student}

    def state_dict(self) -> dict[str, Any]:
        """Return student and teacher."""
        return {"student": self.student.state_dict(), "teacher": self.ema.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the state of a checkpoint, or from before a round that is undone."""
        self.student.load_state_dict(state["student"])
        self.ema.load_state_dict(state["teacher"])


class FedSwitchWork:
    """The client's half: FixMatch steps with labels of a labeller that follows the student.

    In teacher mode the labeller starts as the teacher and is averaged. In student mode it starts as
    the student and follows with decay 0, so that it *is* the student. One step serves both.
    """

    name = "fedswitch"
    only_called = ("student", "labeller")
    answers = Answers({"student": every_tensor}, {**COUNTED, "by_teacher": (0.0, 1.0)})

    def start(self, client: ClientRuntime) -> bool:
        """Decide who labels, load the labeller and draw the round's views. Every client contributes."""
        sent = required_state(client, "student")
        student, labeller = client.model("student"), client.model("labeller")
        student.load_state_dict(sent)
        by_teacher = self._teacher_labels(client, student)
        labeller.load_state_dict(client.fetch("teacher") if by_teacher else sent)
        client.set_buffer("by_teacher", torch.tensor(float(by_teacher)))
        client.set_buffer(
            "ema_decay", torch.tensor(client.settings["ema_decay"] if by_teacher else 0.0)
        )
        indices = client.draw_batches(client.rng("batches"), np.arange(client.count))
        client.draw_view("strong", "strong", indices)
        client.draw_view("weak", "weak", indices)
        client.set_buffer("truth", client.truth(indices))
        start_counter(client)
        return True

    @staticmethod
    def _teacher_labels(client: ClientRuntime, student: nn.Module) -> bool:
        """Return whether the teacher labels: the local images look IID to the student, one weak view each."""
        skew = divergence(client.predict(student, "weak").mean(0))
        return bool(skew <= client.settings["iid_threshold"])

    def step(self, client: ClientRuntime) -> None:
        """Take one FixMatch step: weak views are labelled, strong views are trained on, the labeller follows."""
        student, labeller = client.model("student").train(), client.model("labeller").eval()
        with torch.no_grad():
            labels, confident = pseudo_label(
                labeller(client.batch_of("weak")),
                needed_confidence(client.settings["confidence_threshold"], client.classes),
            )
        loss = consistency(student(client.batch_of("strong")), labels, confident)
        client.descend(student, loss)
        follow(labeller, student, client.buffer("ema_decay"))
        count_loss(client, loss, consistency=loss)
        count_labels(client, labels, confident, client.buffer_step("truth"))

    def finish(self, client: ClientRuntime) -> tuple[dict[str, State], dict[str, float]]:
        """Return the trained student, and loss, coverage and who labelled as numbers."""
        numbers = {**read_counter(client), "by_teacher": float(client.buffer("by_teacher"))}
        return {"student": client.model("student").state_dict()}, numbers
