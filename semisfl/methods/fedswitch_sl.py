"""FedSwitch-SL: FedSwitch with a split model. SemiSFL without projections, queue and contrast.

A reconstruction, as FedSwitch is. Clients lack the top, so the server decides who labels whom:
by the mean prediction over a client's weak features in its last participation, the teacher the
first time. The SemiSFL paper calls this the ablation of clustering regularisation.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from semisfl.algorithm.labelling import Labelling
from semisfl.algorithm.losses import consistency
from semisfl.algorithm.membership import Membership
from semisfl.algorithm.schedule import learning_rate
from semisfl.algorithm.teacher import Teacher
from semisfl.fleet.base import SplitRound
from semisfl.methods import statistics
from semisfl.methods.base import Setup
from semisfl.methods.fedswitch import divergence
from semisfl.methods.fedswitch_settings import FedSwitchSettings
from semisfl.methods.full_model import SupervisedPhase
from semisfl.methods.influence import Influence
from semisfl.metrics import MethodMetrics


class FedSwitchSL:
    """FedSwitch for a split model: the server labels features, by its teacher or its student.

    ``skew`` holds each client's divergence in its last participation, which decides who labels next time.
    """

    def __init__(self, setup: Setup) -> None:
        config, self.setup = setup.config, setup
        self.settings = config.settings(FedSwitchSettings)
        self.student = setup.hardware.working_copy(setup.model.whole())
        self.ema = Teacher(self.student, config.teacher.ema_decay, config.teacher.warmup)
        self.bottom, self.top = setup.model.bottom, setup.model.top
        self.teacher_bottom, self.teacher_top = (
            self.ema.model.get_submodule(part) for part in ("bottom", "top")
        )
        self.supervised = SupervisedPhase(setup, self.student, ema=self.ema)
        self.server_sgd = setup.hardware.optimizer(self.top.parameters(), config.optimizer)
        self.active: tuple[int, ...] = ()
        # By position among the active clients; updated in place, because the step reads it.
        self.by_teacher = torch.ones(
            config.clients.active, dtype=torch.bool, device=setup.hardware.device
        )
        self.skew: dict[int, float] = {}
        """Each client's divergence from uniform in its last participation."""
        self.membership = Membership()
        self.labelling = Labelling(
            self.settings.align,
            self.settings.confidence_threshold,
            ">=",
            setup.labeled.class_mix(setup.classes),
            config.clients.total,
            config.clients.active,
        )
        self.meter = setup.hardware.meter()
        self.influence = Influence(setup)
        self.cross_entity_step = setup.make_step(self._cross_entity_step, with_clients=True)

    def round(self, round_index: int) -> MethodMetrics:
        """Take the supervised steps, then split steps with all active clients.

        Only clients that the teacher will label are sent the teacher's bottom; the others' weak features
        come from their student bottom.
        """
        config, clients, fleet = self.setup.config, self.setup.config.clients, self.setup.fleet
        lr = learning_rate(config.optimizer, round_index, config.rounds)
        steps = config.server.steps
        loss_supervised = self.supervised.run(round_index, steps, lr)
        reported: dict[str, Any] = {}
        if round_index >= config.server.pretrain_rounds:
            self.active = self.setup.active(round_index)
            members = fleet.members()
            for client in self.membership.gone(self.skew, members):
                del self.skew[client]
            # The teacher's bottom goes only to those it will label.
            limit = self.settings.iid_threshold
            by_teacher = [self.skew.get(client, limit) <= limit for client in self.active]
            self.by_teacher[: len(by_teacher)] = torch.tensor(by_teacher)
            fleet.start_round(
                SplitRound(
                    round_index,
                    self.active,
                    clients.steps,
                    lr,
                    self.bottom.state_dict(),
                    self.teacher_bottom.state_dict(),
                    teacher_for=frozenset(
                        c for c, yes in zip(self.active, by_teacher, strict=True) if yes
                    ),
                    teacher_decay=config.teacher.ema_decay,
                    next_active=self.setup.active(round_index + 1),
                )
            )
            self.server_sgd.restart(lr)
            self.influence.start_round()
            self.labelling.start_round(
                round_index - config.server.pretrain_rounds, self.active, members
            )
            for _ in range(clients.steps):
                self.cross_entity_step()
            self.influence.report(self.active, fleet.held_back)
            self.bottom.load_state_dict(fleet.finish_round())
            sums = self.meter.read()
            self._remember(sums["client_predictions"])
            reported = statistics.of_split_round(sums, self.active, clients.steps)
            reported["labelled_by_teacher"] = sum(by_teacher) / len(by_teacher)
        return MethodMetrics(
            learning_rate=lr,
            supervised_steps=steps,
            loss_supervised=loss_supervised,
            **reported,
        )

    def _cross_entity_step(self) -> None:
        """Take one step with every active client: masked cross-entropy with labels of its labeller."""
        features = self.influence.limit_features(self.setup.fleet.forward(), self.active)
        places = [self.active.index(client) for client in features.clients]
        with torch.no_grad():
            by_teacher = self.by_teacher[: len(self.active)].view(-1, 1)
            if len(places) < len(self.active):
                by_teacher = by_teacher[places]
            labeller = torch.where(
                by_teacher.repeat_interleave(features.batch, 0),
                self.teacher_top(features.teacher),
                self.top.eval()(features.teacher),
            )
            labels, confident = self.labelling.label(labeller, features.clients, self.active)
            # Uncorrected: they say how uneven a client looks to its labeller.
            predictions = labeller.float().softmax(1)
        logits = self.top.train()(features.student)
        labels, confident = self.influence.usable_labels(
            features, self.active, logits, labels, confident
        )
        loss = consistency(logits, labels, confident)
        (gradients,) = self.server_sgd.descend(loss, also=[features.student])
        # The loss is a mean over all rows; a client wants the mean over its own.
        self.setup.fleet.backward(gradients * len(features.clients))
        self.meter.add(
            lambda: statistics.of_step(
                features, self.active, labels, confident, self.setup.classes
            ),
            loss_semi=loss,
            loss_consistency=loss,
            client_predictions=self._by_client(predictions, places),
        )

    def _by_client(self, predictions: Tensor, places: list[int]) -> Tensor:
        """Return the sums over each active client's rows; zero for one that did not answer."""
        sums = predictions.new_zeros(len(self.active), predictions.shape[1])
        for place, rows in zip(places, predictions.chunk(len(places)), strict=True):
            sums[place] = rows.sum(0)
        return sums

    def _remember(self, sums: list[list[float]]) -> None:
        """Update ``skew`` from the round's summed predictions [clients, classes]; a row of zeros changes nothing."""
        for client, total in zip(self.active, torch.tensor(sums, dtype=torch.float64), strict=True):
            if total.sum() > 0:
                self.skew[client] = float(divergence(total / total.sum()))

    def tested(self) -> Mapping[str, nn.Module]:
        """Return teacher and student."""
        return {"teacher": self.ema.model, "student": self.student}

    def state_dict(self) -> dict[str, Any]:
        """Return student, teacher and each client's divergence from uniform labels."""
        return {
            "student": self.student.state_dict(),
            "teacher": self.ema.state_dict(),
            "skew": {str(client): value for client, value in self.skew.items()},
            "names": self.membership.state_dict(),
            "labelling": self.labelling.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the state of a checkpoint, or from before a round that is undone."""
        self.student.load_state_dict(state["student"])
        self.ema.load_state_dict(state["teacher"])
        self.skew = {int(client): value for client, value in state["skew"].items()}
        self.membership.load_state_dict(state["names"])
        self.labelling.load_state_dict(state["labelling"])
        self.meter.clear()  # a round that was given up half-way leaves its sums behind
