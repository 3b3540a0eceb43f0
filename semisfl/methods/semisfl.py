"""SemiSFL: split federated learning with clustering regularisation (the paper's Algorithm 1).

Names: ``student`` w = (w_c, w_s, w_p) = (.bottom, .top, .projector), ``teacher`` w~. Where the
paper and its published code differ, the settings say which is followed. `Labelling` and `Influence`
go beyond both; with their default settings they change nothing.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from semisfl import seeds
from semisfl.algorithm.controller import Controller
from semisfl.algorithm.labelling import Labelling
from semisfl.algorithm.losses import References, consistency, contrastive, cross_entropy
from semisfl.algorithm.queue import QUEUES
from semisfl.algorithm.schedule import learning_rate
from semisfl.algorithm.teacher import Teacher
from semisfl.fleet.base import Features, SplitRound
from semisfl.methods import statistics
from semisfl.methods.base import ServerDropout, Setup
from semisfl.methods.influence import Influence
from semisfl.methods.semisfl_settings import SemiSFLSettings
from semisfl.metrics import MethodMetrics


class SemiSFL:
    """The server of Algorithm 1: supervised steps on labels, then steps with all active clients.

    `round` is the algorithm's loop over rounds; `_supervised_step` and `_cross_entity_step` are its two
    inner loops. Comments name the lines and equations.
    """

    def __init__(self, setup: Setup) -> None:
        config, hardware = setup.config, setup.hardware
        settings = self.settings = config.settings(SemiSFLSettings)
        self.setup, self.config, self.together = setup, config, hardware.together
        self.fleet, self.labeled = setup.fleet, setup.labeled
        self.student = student = hardware.working_copy(setup.model)
        self.supervised_sgd = hardware.optimizer(student.parameters(), config.optimizer)
        self.server_sgd = hardware.optimizer(
            [*student.top.parameters(), *student.projector.parameters()], config.optimizer
        )
        self.ema = Teacher(student, config.teacher.ema_decay, config.teacher.warmup)
        self.ema.pair_with(self.supervised_sgd)
        self.teacher = self.ema.model
        self.dropout = ServerDropout(setup)
        queue_seed = seeds.derive(config.seed, "queue")
        self.queue = QUEUES[settings.queue](
            settings.queue_size, student.keys, hardware.device, queue_seed
        )
        self.labelling = Labelling(
            settings.align,
            settings.confidence_threshold,
            settings.confidence_rule,
            setup.labeled.class_mix(setup.classes),
            config.clients.total,
            config.clients.active,
        )
        self.controller = Controller(
            config.controller, config.server.steps, config.clients.steps, setup.labeled_share
        )
        self.meter, self.influence = hardware.meter(), Influence(setup)
        self.active: tuple[int, ...] = ()
        self.supervised_step = setup.make_step(self._supervised_step)
        self.cross_entity_step = setup.make_step(self._cross_entity_step, with_clients=True)

    def round(self, round_index: int) -> MethodMetrics:
        """Train round h (lines 3 to 23 of Algorithm 1) and return its metrics."""
        config, clients = self.config, self.config.clients
        lr = learning_rate(config.optimizer, round_index, config.rounds)
        supervised_steps = self.controller.supervised_steps
        self.dropout.start(round_index)

        # Lines 3-6: supervised training on the server.
        self.labeled.start(round_index, supervised_steps, config.labeled_view)
        self.supervised_sgd.restart(lr)
        for _ in range(supervised_steps):
            self.supervised_step()

        self.active = ()
        if round_index >= config.server.pretrain_rounds:
            # Line 7: broadcast w_c and w~_c.
            self.active = self.setup.active(round_index)
            self.fleet.start_round(self._plan(round_index, lr))
            # Lines 8-17: semi-supervised training across server and clients.
            self.server_sgd.restart(lr)
            self.influence.start_round()
            before, members = round_index - config.server.pretrain_rounds, self.fleet.members()
            self.labelling.start_round(before, self.active, members)
            for _ in range(clients.steps):
                self.cross_entity_step()
            self.influence.report(self.active, self.fleet.held_back)
            # Lines 18-21: the mean of the bottoms.
            self.student.bottom.load_state_dict(self.fleet.finish_round())
            self.queue.end_round()

        # Lines 22-23: the next round's supervised steps.
        sums = self.meter.read()
        loss_supervised = sums["loss_supervised"] / supervised_steps
        loss_semi = sums["loss_semi"] / clients.steps if self.active else 0.0
        self.controller.observe(loss_supervised, loss_semi, lr)
        reported: dict[str, Any] = {}
        if self.active:
            of_clients = statistics.of_split_round(sums, self.active, clients.steps)
            reported = {"loss_clustering": 0.0, **of_clients}  # 0 if C is switched off
        return MethodMetrics(
            learning_rate=lr,
            supervised_steps=supervised_steps,
            loss_supervised=loss_supervised,
            loss_supervised_contrast=sums.get("loss_supervised_contrast", 0.0) / supervised_steps,
            **reported,
        )

    def _plan(self, round_index: int, lr: float) -> SplitRound:
        teacher = self.config.teacher
        return SplitRound(
            round_index,
            self.active,
            self.config.clients.steps,
            lr,
            self.student.bottom.state_dict(),
            self.teacher.bottom.state_dict(),
            teacher_decay=teacher.ema_decay if self.settings.client_teacher == "ema" else None,
            next_active=self.setup.active(round_index + 1),
        )

    def _supervised_step(self) -> None:
        """Take one step down f_s = H + T (line 4), and move the teacher (line 5)."""
        settings, student, teacher = self.settings, self.student, self.teacher
        for_student, targets, for_teacher, labels = self.labeled.next_two()
        student.train()

        def student_pass() -> tuple[Tensor, Tensor | None]:
            features = student.bottom(for_student)
            if not settings.supervised_contrast:
                return cross_entropy(student.top(features), *targets), None
            logits, projections = student.outputs(features)
            return cross_entropy(logits, *targets), projections  # H

        def teacher_pass() -> References:
            with torch.no_grad():
                keys = teacher.project(teacher.bottom(for_teacher))
            return self.queue.push_labeled(keys, labels)

        (loss, projections), references = self.together(student_pass, teacher_pass)
        contrast = None
        if projections is not None:
            mask = None if settings.own_key else _own_key(labels, projections, references.keys)
            contrast = contrastive(projections, targets.own, references, settings.temperature, mask)
            loss = loss + contrast  # T, Eq. (3)
        self.meter.add(loss_supervised=loss, loss_supervised_contrast=contrast)
        self.supervised_sgd.descend(loss)  # Line 4
        self.ema.update()  # Line 5

    def _cross_entity_step(self) -> None:
        """Take one step with every active client: lines 10 to 16."""
        student, teacher, active = self.student, self.teacher, self.active
        features = self.influence.limit_features(self.fleet.forward(), active)  # Line 11
        student.train()

        # Line 12: labels q-hat and keys z~ by the teacher, logits and projections z by the student.
        @torch.no_grad()
        def teacher_pass() -> tuple[tuple[Tensor, Tensor], Tensor]:
            logits, keys = teacher.outputs(features.teacher)
            return self.labelling.label(logits, features.clients, active), keys

        (labelled, keys), (logits, projections) = self.together(
            teacher_pass, lambda: student.outputs(features.student)
        )
        labels, confident = self.influence.usable_labels(features, active, logits, *labelled)
        agreement, clustering = self.together(
            lambda: consistency(logits, labels, confident),  # H, Eq. (1)
            lambda: self._clustering(features, projections, keys, labels, confident),  # C, Eq. (5)
        )
        loss = agreement if clustering is None else agreement + clustering
        self.meter.add(
            lambda: statistics.of_step(features, active, labels, confident, self.setup.classes),
            loss_semi=loss,
            loss_consistency=agreement,
            loss_clustering=clustering,
        )
        # Lines 13 and 16: f_u = H + C descends w_s and w_p. C reaches the bottoms but not the top, unless the
        # bottoms are frozen: then it teaches the top (`SplitModel.embedded`).
        (gradients,) = self.server_sgd.descend(loss, also=[features.student])
        # Line 14. The loss is a mean over all rows; a client needs the mean over its own.
        self.fleet.backward(gradients * len(features.clients))

    def _clustering(
        self,
        features: Features,
        projections: Tensor,
        keys: Tensor,
        labels: Tensor,
        confident: Tensor,
    ) -> Tensor | None:
        """Return C of Eq. (5), and put the keys into the queue; None where it is switched off."""
        settings = self.settings
        if not settings.clustering:
            return None
        in_turn = settings.server_pass == "in_turn"
        mask = self.queue.mask_in_turn(features.owner, features.batch) if in_turn else None
        positives = self.influence.as_positives(features, labels, confident)
        references = self.queue.push_pseudo(keys, labels, positives)
        return contrastive(projections, labels, references, settings.temperature, mask)

    def tested(self) -> Mapping[str, nn.Module]:
        """Return teacher and student; the paper reports the teacher's accuracy."""
        return {"teacher": self.teacher, "student": self.student}

    def state_dict(self) -> dict[str, Any]:
        """Return student, teacher, queue, controller and corrections: all that the next round depends on."""
        return {
            "student": self.student.state_dict(),
            "teacher": self.ema.state_dict(),
            "queue": self.queue.state_dict(),
            "controller": self.controller.state_dict(),
            "labelling": self.labelling.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the state of a checkpoint, or from before a round that is undone."""
        self.student.load_state_dict(state["student"])
        self.ema.load_state_dict(state["teacher"])
        self.queue.load_state_dict(state["queue"])
        self.controller.load_state_dict(state["controller"])
        self.labelling.load_state_dict(state["labelling"])
        self.meter.clear()  # an aborted round leaves its sums behind


def _own_key(labels: Tensor, anchors: Tensor, references: Tensor) -> Tensor:
    """Return the mask of each anchor's own teacher key: A(j) in the paper leaves j out."""
    own = torch.eye(len(labels), len(references), dtype=torch.bool, device=references.device)
    return own.repeat(len(anchors) // len(labels), 1)
