"""SemiSFL: split federated learning with clustering regularisation (the paper's Algorithm 1).

Names: ``student`` w = (w_c, w_s, w_p) = (.bottom, .top, .projector), ``teacher`` w~. Where the
paper and its published code differ, the configuration says which is followed; see `config.py`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semisfl import seeds
from semisfl.algorithm.controller import Controller
from semisfl.algorithm.losses import consistency, contrastive, pseudo_label
from semisfl.algorithm.queue import QUEUES
from semisfl.algorithm.schedule import learning_rate
from semisfl.algorithm.teacher import Teacher
from semisfl.engine.sgd import SGD
from semisfl.fleet.base import Features, SplitRound, draw_active
from semisfl.methods import statistics
from semisfl.methods.base import Meter, ServerDropout, Setup
from semisfl.rows import MethodRow


class SemiSFL:
    def __init__(self, setup: Setup) -> None:
        config, self.config = setup.config, setup.config
        self.fleet, self.labeled, self.classes = setup.fleet, setup.labeled, setup.classes
        device = setup.hardware.device
        self.student = setup.hardware.working_copy(setup.model)
        ema = Teacher(self.student, config.teacher.ema_decay, config.teacher.warmup)
        self.ema, self.teacher = ema, ema.model
        self.dropout = ServerDropout(setup)
        queue_seed = seeds.derive(config.seed, "queue")
        self.queue = QUEUES[config.semisfl.queue](
            config.semisfl.queue_size, self.student.keys, device, queue_seed
        )
        self.controller = Controller(
            config.controller, config.server.steps, config.clients.steps, setup.labeled_share
        )
        self.side_by_side, aside = setup.hardware.side_by_side, setup.hardware.aside
        self.supervised_sgd = SGD(self.student.parameters(), config.optimizer, aside)
        server_side = [*self.student.top.parameters(), *self.student.projector.parameters()]
        self.server_sgd = SGD(server_side, config.optimizer, aside)
        self.meter = Meter(setup.hardware)
        self.active: tuple[int, ...] = ()
        self.supervised_step = setup.hardware.record(self._supervised_step)
        self.cross_entity_step = setup.hardware.record(
            self._cross_entity_step, setup.fleet.capturable
        )

    def round(self, round_index: int) -> MethodRow:
        """Round h: lines 3 to 23 of Algorithm 1."""
        config = self.config
        lr = learning_rate(config.optimizer, round_index, config.rounds)
        supervised_steps = self.controller.supervised_steps
        self.dropout.start(round_index)

        # Lines 3-6: supervised training on the server.
        self.labeled.start(round_index, supervised_steps, config.semisfl.labeled_view)
        self.supervised_sgd.restart(lr)
        for _ in range(supervised_steps):
            self.supervised_step()

        active: tuple[int, ...] = ()
        if round_index >= config.server.pretrain_rounds:
            # Line 7: broadcast w_c and w~_c.
            clients = config.clients
            active = draw_active(
                config.seed, round_index, clients.total, self.fleet.present(), clients.active
            )
            self.active = active
            self.fleet.start_round(
                SplitRound(
                    round_index,
                    active,
                    clients.steps,
                    lr,
                    self.student.bottom.state_dict(),
                    self.teacher.bottom.state_dict(),
                    teacher_decay=config.teacher.ema_decay
                    if config.teacher.client == "ema"
                    else None,
                )
            )
            # Lines 9-17: cross-entity semi-supervised training.
            self.server_sgd.restart(lr)
            for _ in range(clients.steps):
                self.cross_entity_step()
            # Lines 18-21: the mean of the bottoms.
            self.student.bottom.load_state_dict(self.fleet.finish_round())
            self.queue.end_round()

        # Lines 22-23: the next round's supervised steps.
        sums = self.meter.read()
        loss_supervised = sums["loss_supervised"] / supervised_steps
        loss_semi = sums["loss_semi"] / clients.steps if active else 0.0
        self.controller.observe(loss_supervised, loss_semi, lr)
        return MethodRow(
            learning_rate=lr,
            supervised_steps=supervised_steps,
            loss_supervised=loss_supervised,
            loss_supervised_contrast=sums["loss_supervised_contrast"] / supervised_steps,
            **(statistics.of_split_round(sums, active, clients.steps) if active else {}),
        )

    def _supervised_step(self) -> None:
        """Lines 4 and 5: one step down L_s = H + T, and the teacher's moving average."""
        method, student, teacher = self.config.semisfl, self.student, self.teacher
        for_student, for_teacher, labels = self.labeled.next_two()
        student.train()

        def classify() -> tuple[Tensor, Tensor]:
            features = student.bottom(for_student)
            return F.cross_entropy(student.top(features).float(), labels), features

        @torch.no_grad()
        def make_keys() -> Tensor:
            return teacher.project(teacher.bottom(for_teacher))

        if method.supervised_contrast:
            (loss, features), keys = self.side_by_side([classify, make_keys])
            references = self.queue.push_labeled(keys, labels)
            own = None if method.own_key else _own_key(len(labels), references.keys)
            contrast = contrastive(
                student.project(features), labels, references, method.temperature, own
            )
            loss = loss + contrast
        else:
            loss, _ = classify()
            contrast = torch.zeros_like(loss)
        self.supervised_sgd.descend(loss, followed_by=self.ema)
        self.meter.add(loss_supervised=loss, loss_supervised_contrast=contrast)

    def _cross_entity_step(self) -> None:
        """Lines 10 to 16: one exchange with every active client."""
        method, student, teacher = self.config.semisfl, self.student, self.teacher
        features = self.fleet.forward()  # Line 11
        student.train()

        @torch.no_grad()
        def ask_teacher() -> tuple[Tensor, Tensor, Tensor | None]:  # Line 12: q-hat and z~
            labels, confident = pseudo_label(
                teacher.top(features.teacher), method.confidence_threshold, method.confidence_rule
            )
            keys = teacher.project(features.teacher) if method.clustering else None
            return labels, confident, keys

        def ask_student() -> tuple[Tensor, Tensor | None]:
            projections = student.project(features.student) if method.clustering else None
            return student.top(features.student), projections

        teachers, students = self.side_by_side([ask_teacher, ask_student])
        (labels, confident, keys), (logits, projections) = teachers, students
        loss = consistency(logits, labels, confident)  # Eq. (1)
        clustering = torch.zeros_like(loss)
        if method.clustering:
            references = self.queue.push_pseudo(keys, labels, confident)
            others = (
                None
                if method.server_pass == "joint"
                else _keys_of_others(features, references.keys)
            )
            clustering = contrastive(
                projections, labels, references, method.temperature, others
            )  # Eq. (5)
        # Lines 13 and 16: L_u = H + C descends w_s and w_p. C reaches the bottoms but not the top.
        (gradients,) = self.server_sgd.descend(loss + clustering, also=[features.student])
        # Line 14. The loss is a mean over all rows; a client wants the mean over its own.
        self.fleet.backward(gradients * len(features.clients))
        self.meter.add(
            loss_semi=loss + clustering,
            loss_consistency=loss,
            loss_clustering=clustering,
            **statistics.of_step(features, self.active, labels, confident, self.classes),
        )

    def tested(self) -> Mapping[str, nn.Module]:
        return {"teacher": self.teacher, "student": self.student}

    def state_dict(self) -> dict[str, Any]:
        return {
            "student": self.student.state_dict(),
            "teacher": self.ema.state_dict(),
            "queue": self.queue.state_dict(),
            "controller": self.controller.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.student.load_state_dict(state["student"])
        self.ema.load_state_dict(state["teacher"])
        self.queue.load_state_dict(state["queue"])
        self.controller.load_state_dict(state["controller"])
        self.meter.clear()  # a round that was given up half-way leaves its sums behind


def _own_key(rows: int, references: Tensor) -> Tensor:
    """Mask that hides each anchor's own teacher key, as A(j) in the paper leaves j out."""
    return torch.eye(rows, len(references), dtype=torch.bool, device=references.device)


def _keys_of_others(features: Features, references: Tensor) -> Tensor:
    """Mask that hides the current keys of other clients, as if clients were served in turn."""
    rows = len(features.owner)
    hidden = torch.zeros(rows, len(references), dtype=torch.bool, device=references.device)
    hidden[:, :rows] = features.owner.unsqueeze(1) != features.owner.unsqueeze(0)
    return hidden
