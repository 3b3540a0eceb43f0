"""The round of a split method that has one loss: a derived class writes `SplitMethod.loss` and is complete.

`fedswitch_sl` and the example of docs/own-method.md are made this way. `semisfl` is not: it has two kinds of
labelled batches, a queue and a controller, and follows Algorithm 1 line by line without a base class.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from semisfl.algorithm.schedule import learning_rate
from semisfl.algorithm.teacher import Teacher
from semisfl.fleet.base import Features, SplitRound
from semisfl.methods import statistics
from semisfl.methods.base import Setup
from semisfl.methods.full_model import SupervisedPhase
from semisfl.methods.influence import Influence
from semisfl.metrics import MethodMetrics


class SplitMethod:
    """A split method: the server labels features, trains the top and returns the features' gradients.

    A round has four parts: supervised steps of the whole model, each followed by the teacher; the broadcast of
    the student's and the teacher's bottom; steps with all active clients, each down `loss`; the mean of the bottoms.

    A derived class may read ``setup`` (the run), ``student`` (bottom and top, trained), ``top``, ``teacher_top`` (in
    eval mode, never trained), ``active`` (the round's clients, sorted) and ``meter`` (sums over a round's steps).
    Where it keeps more state, it adds this to `state_dict` and `load_state_dict`.
    """

    def __init__(self, setup: Setup) -> None:
        config, hardware = setup.config, setup.hardware
        self.setup = setup
        self.student = hardware.working_copy(setup.model.whole())
        self.ema = Teacher(self.student, config.teacher.ema_decay, config.teacher.warmup)
        self.bottom, self.top = setup.model.bottom, setup.model.top
        self.teacher_bottom, self.teacher_top = (
            self.ema.model.get_submodule(part) for part in ("bottom", "top")
        )
        self.supervised = SupervisedPhase(setup, self.student, ema=self.ema)
        self.server_sgd = hardware.optimizer(self.top.parameters(), config.optimizer)
        self.meter, self.influence = hardware.meter(), Influence(setup)
        self.active: tuple[int, ...] = ()
        self.cross_entity_step = setup.make_step(self._cross_entity_step, with_clients=True)

    # --- what a derived class writes -------------------------------------------------------------------

    def loss(self, features: Features) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss of one step, its pseudo-labels and which of them are used.

        The step is captured once and replayed, so nothing in here may depend on a value on the device: no
        ``.item()``, no shape that depends on data (`Hardware.make_step`).

        Args:
            features: those of all clients that answered. ``student`` and ``teacher`` are [rows, d]; ``top`` is in
                train mode, with dropout.

        Returns:
            The loss, a mean over all rows; its gradient reaches the top and each client's bottom. The labels [rows].
            Which labels are used, [rows]: bool, or weights from 0 to 1. Both are for metrics only.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method loss(features)")

    def plan(self, round_index: int, lr: float) -> SplitRound:
        """Return what the active clients are sent at the start of a round; the place to prepare its steps."""
        return SplitRound(
            round_index,
            self.active,
            self.setup.config.clients.steps,
            lr,
            self.bottom.state_dict(),
            self.teacher_bottom.state_dict(),
            teacher_decay=self.setup.config.teacher.ema_decay,
            next_active=self.setup.active(round_index + 1),
        )

    def report(self, plan: SplitRound, sums: Mapping[str, Any]) -> dict[str, Any]:
        """Return further fields of the round's `MethodMetrics`; ``sums`` are what was added to ``meter``."""
        return {}

    def within_limits(
        self, features: Features, logits: Tensor, labels: Tensor, used: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return ``labels`` and ``used`` [rows] without the rows of clients that ``robust.features`` excludes.

        ``logits`` [rows, classes] are the student's. A method that does not call this has no such limit.
        """
        return self.influence.usable_labels(features, self.active, logits, labels, used)

    # --- the round -------------------------------------------------------------------------------------

    def round(self, round_index: int) -> MethodMetrics:
        """Take the supervised steps, then steps with all active clients; return the round's metrics."""
        config, fleet = self.setup.config, self.setup.fleet
        lr = learning_rate(config.optimizer, round_index, config.rounds)
        loss_supervised = self.supervised.run(round_index, config.server.steps, lr)
        reported: dict[str, Any] = {}
        if round_index >= config.server.pretrain_rounds:
            self.active = self.setup.active(round_index)
            plan = self.plan(round_index, lr)
            fleet.start_round(plan)
            self.server_sgd.restart(lr)
            self.influence.start_round()
            for _ in range(plan.steps):
                self.cross_entity_step()
            self.influence.report(self.active, fleet.held_back)
            self.bottom.load_state_dict(fleet.finish_round())
            sums = self.meter.read()
            reported = {
                **statistics.of_split_round(sums, self.active, plan.steps),
                **self.report(plan, sums),
            }
        return MethodMetrics(
            learning_rate=lr,
            supervised_steps=config.server.steps,
            loss_supervised=loss_supervised,
            **reported,
        )

    def _cross_entity_step(self) -> None:
        """Take one step with every active client."""
        features = self.influence.limit_features(self.setup.fleet.forward(), self.active)
        self.top.train()
        loss, labels, used = self.loss(features)
        (gradients,) = self.server_sgd.descend(loss, also=[features.student])
        # The loss is a mean over all rows; a client needs the mean over its own.
        self.setup.fleet.backward(gradients * len(features.clients))
        self.meter.add(
            lambda: statistics.of_step(features, self.active, labels, used, self.setup.classes),
            loss_semi=loss,
        )

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
        self.meter.clear()  # a round that was given up half-way leaves its sums behind
