"""SemiSFL: split federated learning with clustering regularisation (the paper's Algorithm 1).

Names: ``student`` w = (w_c, w_s, w_p) = (.bottom, .top, .projector), ``teacher`` w~. Where the
paper and its published code differ, the configuration says which is followed. `Labelling`
goes beyond both, and follows the paper unless set.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from semisfl import seeds
from semisfl.algorithm.controller import Controller
from semisfl.algorithm.labelling import Labelling
from semisfl.algorithm.losses import consistency, contrastive, cross_entropy
from semisfl.algorithm.queue import QUEUES
from semisfl.algorithm.schedule import learning_rate
from semisfl.algorithm.teacher import Teacher
from semisfl.engine.sgd import SGD
from semisfl.fleet.base import SplitRound
from semisfl.methods import statistics
from semisfl.methods.base import Meter, ServerDropout, Setup
from semisfl.methods.influence import Influence
from semisfl.methods.semisfl_settings import SemiSFLSettings
from semisfl.metrics import MethodMetrics


class SemiSFL:
    def __init__(self, setup: Setup) -> None:
        config, self.config = setup.config, setup.config
        settings = self.settings = config.settings(SemiSFLSettings)
        self.setup, self.fleet, self.labeled = setup, setup.fleet, setup.labeled
        self.student = setup.hardware.working_copy(setup.model)
        ema = Teacher(self.student, config.teacher.ema_decay, config.teacher.warmup)
        self.ema, self.teacher = ema, ema.model
        self.dropout = ServerDropout(setup)
        queue_seed = seeds.derive(config.seed, "queue")
        self.queue = QUEUES[settings.queue](
            settings.queue_size,
            self.student.keys,
            setup.hardware.device,
            queue_seed,
        )
        self.labelling = Labelling(
            settings.labels,
            settings.confidence_threshold,
            settings.confidence_rule,
            setup.labeled.class_mix(setup.classes),
            config.clients.total,
            config.clients.active,
        )
        self.controller = Controller(
            config.controller, config.server.steps, config.clients.steps, setup.labeled_share
        )
        streams = setup.hardware.streams
        self.overlap, self.beside = streams.overlap, streams.side
        self.supervised_sgd = SGD(
            self.student.parameters(), config.optimizer, streams, followed_by=ema.average
        )
        server_side = [*self.student.top.parameters(), *self.student.projector.parameters()]
        self.server_sgd = SGD(server_side, config.optimizer, streams)
        self.meter = Meter(setup.hardware)
        self.influence = Influence(setup)
        self.active: tuple[int, ...] = ()
        self.supervised_step = setup.capture(self._supervised_step)
        self.cross_entity_step = setup.capture(self._cross_entity_step, setup.fleet.capturable)

    def round(self, round_index: int) -> MethodMetrics:
        """Round h: lines 3 to 23 of Algorithm 1."""
        config, clients = self.config, self.config.clients
        lr = learning_rate(config.optimizer, round_index, config.rounds)
        supervised_steps = self.controller.supervised_steps
        self.dropout.start(round_index)

        # Lines 3-6: supervised training on the server.
        self.labeled.start(round_index, supervised_steps, self.settings.labeled_view)
        self.supervised_sgd.restart(lr)
        for _ in range(supervised_steps):
            self.supervised_step()

        self.active = ()
        if round_index >= config.server.pretrain_rounds:
            # Line 7: broadcast w_c and w~_c.
            self.active = self.setup.active(round_index)
            self.fleet.start_round(self._plan(round_index, lr))
            # Lines 8-17: cross-entity semi-supervised training.
            self.server_sgd.restart(lr)
            self.influence.start_round()
            self.labelling.start_round(round_index, self.active)
            for _ in range(clients.steps):
                self.cross_entity_step()
            self.influence.tell(self.active, self.fleet.held_back)
            # Lines 18-21: the mean of the bottoms.
            self.student.bottom.load_state_dict(self.fleet.finish_round())
            self.queue.end_round()

        # Lines 22-23: the next round's supervised steps.
        sums = self.meter.read()
        loss_supervised = sums["loss_supervised"] / supervised_steps
        loss_semi = sums["loss_semi"] / clients.steps if self.active else 0.0
        self.controller.observe(loss_supervised, loss_semi, lr)
        return MethodMetrics(
            learning_rate=lr,
            supervised_steps=supervised_steps,
            loss_supervised=loss_supervised,
            loss_supervised_contrast=sums.get("loss_supervised_contrast", 0.0) / supervised_steps,
            **(statistics.of_split_round(sums, self.active, clients.steps) if self.active else {}),
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
        """Lines 4 and 5: one step down L_s = H + T, and the teacher's moving average."""
        settings, student, teacher = self.settings, self.student, self.teacher
        for_student, for_teacher, labels = self.labeled.next_two()
        student.train()
        with self.overlap:
            features = student.bottom(for_student)
            shown = _for_each_view(labels, for_student)
            loss = cross_entropy(student.top(features), shown)  # H
            projections = student.project(features) if settings.supervised_contrast else None
        with torch.no_grad():
            keys = teacher.project(teacher.bottom(for_teacher))
        references = self.queue.push_labeled(keys, labels)
        self.overlap.join()
        parts = {}
        if projections is not None:
            mask = None if settings.own_key else _own_key(labels, shown, references.keys)
            contrast = contrastive(
                projections, shown, references, settings.temperature, mask
            )  # T, Eq. (3)
            loss, parts = loss + contrast, {"loss_supervised_contrast": contrast}
        with self.beside(loss, *parts.values()):
            self.meter.add(loss_supervised=loss, **parts)
        self.supervised_sgd.descend(loss)  # Line 4
        self.ema.update()  # Line 5

    def _cross_entity_step(self) -> None:
        """Lines 10 to 16: one exchange with every active client."""
        settings, student, teacher = self.settings, self.student, self.teacher
        features = self.influence.limited(self.fleet.forward(), self.active)  # Line 11
        student.train()
        with self.overlap, torch.no_grad():  # Line 12: q-hat and z~
            labels, confident = self.labelling.label(
                teacher.top(features.teacher), features.clients, self.active
            )
            keys = teacher.project(features.teacher)
        logits = student.top(features.student)
        projections = student.project(features.student)
        self.overlap.join()
        labels, confident = self.influence.believed(
            features, self.active, logits, labels, confident
        )
        with self.overlap:
            loss = consistency(logits, labels, confident)  # H, Eq. (1)
        parts = {"loss_consistency": loss}
        if settings.clustering:
            in_turn = settings.server_pass == "in_turn"
            mask = self.queue.mask_in_turn(features.owner, features.batch) if in_turn else None
            positives = self.influence.as_positives(features, labels, confident)
            references = self.queue.push_pseudo(keys, labels, positives)
            clustering = contrastive(
                projections, labels, references, settings.temperature, mask
            )  # C, Eq. (5)
            parts["loss_clustering"] = clustering
        self.overlap.join()
        if settings.clustering:
            loss = loss + clustering
        with self.beside(labels, confident, loss, *parts.values()):
            counts = statistics.of_step(
                features, self.active, labels, confident, self.setup.classes
            )
            self.meter.add(loss_semi=loss, **parts, **counts)
        # Lines 13 and 16: L_u = H + C descends w_s and w_p. C reaches the bottoms but not the top.
        (gradients,) = self.server_sgd.descend(loss, also=[features.student])
        # Line 14. The loss is a mean over all rows; a client wants the mean over its own.
        self.fleet.backward(gradients * len(features.clients))

    def tested(self) -> Mapping[str, nn.Module]:
        return {"teacher": self.teacher, "student": self.student}

    def state_dict(self) -> dict[str, Any]:
        state = {
            "student": self.student.state_dict(),
            "teacher": self.ema.state_dict(),
            "queue": self.queue.state_dict(),
            "controller": self.controller.state_dict(),
        }
        if labelling := self.labelling.state_dict():
            state["labelling"] = labelling
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.student.load_state_dict(state["student"])
        self.ema.load_state_dict(state["teacher"])
        self.queue.load_state_dict(state["queue"])
        self.controller.load_state_dict(state["controller"])
        self.labelling.load_state_dict(state.get("labelling", {}))
        self.meter.clear()  # a round that was given up half-way leaves its sums behind


def _for_each_view(labels: Tensor, images: Tensor) -> Tensor:
    """Labels of ``images``, which may be several views one after the other."""
    views = len(images) // len(labels)
    return labels.repeat(views) if views > 1 else labels


def _own_key(labels: Tensor, shown: Tensor, references: Tensor) -> Tensor:
    """Mask of each anchor's own teacher key, as A(j) in the paper leaves j out."""
    own = torch.eye(len(labels), len(references), dtype=torch.bool, device=references.device)
    return own.repeat(len(shown) // len(labels), 1)
