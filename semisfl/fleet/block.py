"""A block of clients in this process: their bottoms, and what they compute in a round.

A simulation has one block of all active clients, a rank of torchrun has a share of them, and a
device has a block of one. All three do the same arithmetic.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from semisfl import seeds
from semisfl.data.batches import Views, join_views, split_views
from semisfl.engine.host import HostShelf
from semisfl.engine.weights import clone
from semisfl.fleet.base import ClientResult, ClientWork, Features, FullRound, SplitRound, State
from semisfl.fleet.byte_counts import Traffic
from semisfl.fleet.caps import RoundSizes
from semisfl.fleet.codec import codec_named, roundtrip_state, state_bytes
from semisfl.fleet.local_full import FullModelClients
from semisfl.fleet.outgoing import Cleared, Outgoing
from semisfl.fleet.setup import FleetSetup
from semisfl.models.layers import batchnorms, use_generator
from semisfl.models.stack import Stack


@dataclass(frozen=True)
class StepFeatures:
    """One step's features of a block, which may leave, and true labels."""

    cleared: Cleared
    truth: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the student's and the teacher's features and the true labels."""
        features = self.cleared.tensors
        return features["student"], features["teacher"], self.truth

    def features(self, clients: tuple[int, ...]) -> Features:
        """Return the features as the server holds them."""
        student, teacher, truth = self.tensors()
        return Features(student.requires_grad_(), teacher, clients, truth)


class ClientsHere:
    """Clients of this process as index lists into one data set on the device.

    Every byte is counted in ``traffic``, and nothing leaves that has not passed through ``outgoing``, the clients'
    policy.
    """

    def __init__(self, setup: FleetSetup) -> None:
        """Take the images, the labels and who holds which from ``setup``.

        Raises `PolicyBreach` if the run's terms break the clients' policy.
        """
        assert setup.images is not None and setup.labels is not None, "clients' images are here"
        self.config, self.hardware = setup.config, setup.hardware
        self.traffic = Traffic()
        self.outgoing = setup.outgoing or Outgoing()
        self.outgoing.agree(setup.config)
        self.shards = [np.asarray(shard) for shard in setup.shards]
        self.images, self.labels = setup.images, setup.labels
        self.sizes = RoundSizes.of(setup.model, setup.config.clients.batch, len(setup.images))


class ClientBlock(ClientsHere):
    """Clients of this process that train; the active ones' weights lie in a `Stack`.

    A split round is `start_round`, then `forward` and `backward` per step, then `bottoms` (or `mean`).
    A full-model round is `train`.
    """

    def __init__(self, setup: FleetSetup) -> None:
        """Copy the bottom of ``setup``, and make the batches of its images."""
        super().__init__(setup)
        model = setup.model
        self.batches = setup.batches(self.images)
        self._size = setup.shape[1:]
        self._bottom = clone(model.bottom)
        # A teacher normalises by the statistics of its client's batch, as in the authors' code.
        self._teacher_per_client = any(batchnorms(model.bottom))
        self._slots = 0
        self._features = model.features
        self._full = FullModelClients(setup, self.shards, self.batches, self.traffic)

    # --- a split round ---------------------------------------------------------------------------

    def start_round(self, plan: SplitRound) -> None:
        """Load what the server sent, seed the clients' draws and prepare the round's images.

        The images of the round after it are prepared too, when the host would otherwise wait for a GPU.
        """
        self._plan = plan
        self._make_slots(len(plan.active))
        wire = self.config.wire
        self.outgoing.start_round(plan.index, plan.active, self.hardware)
        self._sent = bottom = roundtrip_state(plan.bottom, wire.models)
        self._students.load(bottom)
        self._teachers.load(roundtrip_state(plan.teacher_bottom, wire.models))
        self._decay.fill_(1.0 if plan.teacher_decay is None else plan.teacher_decay)
        teacher_bytes = state_bytes(plan.teacher_bottom, wire.models)
        for slot, client in enumerate(plan.active):
            self._generators[slot].manual_seed(
                seeds.derive(self.config.seed, "dropout", plan.index, client)
            )
            self.traffic.add("model", "down", client, state_bytes(plan.bottom, wire.models))
            if plan.teacher_for is None or client in plan.teacher_for:
                self.traffic.add("teacher", "down", client, teacher_bytes)
            else:
                # A labeller that follows the student with decay 0 is the student.
                self._teachers.load(bottom, slot)
                self._decay[slot] = 0.0
        self._sgd.restart(plan.lr * self.config.optimizer.pretrained_share)
        self.batches.start_from((plan.index, plan.active, plan.steps), self._make_views)
        if plan.next_active:
            key = (plan.index + 1, plan.next_active, plan.steps)
            self.hardware.streams.while_busy(lambda: self.batches.ahead(key, self._make_views))

    def _make_views(self, index: int, active: tuple[int, ...], steps: int) -> Views:
        """Return the strong and weak views of a round, clients side by side, and the true labels."""
        views = [
            split_views(
                self.batches.augmentation,
                self.shards[client],
                self._size,
                steps,
                self.config.clients.batch,
                self.config.seed,
                index,
                client,
            )
            for client in active
        ]
        together = {name: join_views([view[name] for view in views]) for name in views[0]}
        truth = self.labels[torch.from_numpy(together["weak"].indices).to(self.labels.device)]
        return together, {"truth": truth}

    def _make_slots(self, slots: int) -> None:
        """Make stacks of ``slots`` students and teachers with their optimiser; keep those of the last round if they fit."""
        if slots == self._slots:
            return
        dtype = self.hardware.weights_dtype
        self._students = Stack(self._bottom.train(), slots, dtype=dtype)
        self._teachers = Stack(self._bottom, slots, trainable=False, dtype=dtype)
        for module in self._teachers.modules:
            module.eval()
            for layer in batchnorms(module):
                layer.train(self._teacher_per_client)
        # A bottom may hold dropout if the cut lies behind it: each client draws its own.
        self._generators = [self.hardware.generator(0) for _ in range(slots)]
        for module, generator in zip(self._students.modules, self._generators, strict=True):
            use_generator(module, generator)
        self._decay = torch.ones(slots, device=self.hardware.device)
        self._sgd = self.hardware.sgd(self._students.parameters, self.config.optimizer)
        self._slots = slots

    @property
    def _teachers_differ(self) -> bool:
        """Return whether clients' teachers can be anything but the one that was sent."""
        return self._plan.teacher_decay is not None or self._plan.teacher_for is not None

    def forward(self) -> StepFeatures:
        """Compute one batch of features of every active client and pass them through the policy.

        Strong views go through the students, weak views through the teachers; rows of the clients side by side.
        """
        strong, weak = self.batches.get("strong"), self.batches.get("weak")
        parallel = self.hardware.streams.side_by_side
        if self.hardware.device.type == "cpu":
            # One queue for both models, so that no core waits between the students and the teachers.
            calls = self._students.calls(strong)
            with self.hardware.streams.a_core_each():
                outputs = parallel([*calls, *self._teachers.calls(weak)])
            self._outputs = self._students.join(outputs[: len(calls)])
            teacher = self._teachers.join(outputs[len(calls) :])
        else:
            self._outputs = self._students(strong, parallel)
            with torch.no_grad():
                teacher = (
                    self._teachers.modules[0](weak)
                    if self._one_teacher
                    else self._teachers(weak, parallel)
                )
        cleared, self._guarded = self.outgoing.features(
            self._outputs.detach().float(), teacher.float(), len(self._plan.active)
        )
        return StepFeatures(cleared, self.batches.extra("truth"))

    @property
    def _one_teacher(self) -> bool:
        """Return whether one large pass gives all clients' teacher features."""
        return not self._teacher_per_client and not self._teachers_differ

    def backward(self, gradients: Tensor) -> None:
        """Back-propagate each client's rows of ``gradients`` and take one step.

        With teachers that follow their students, they follow here, after the step.
        """
        crossed = codec_named(self.config.wire.gradients).roundtrip(gradients)
        received = self._guarded.gradient(crossed).to(self._outputs.dtype)
        if self.hardware.device.type == "cuda":
            # One call: autograd itself takes every operation back to the stream it came from.
            self._sgd.descend(self._outputs, gradient=received)
        else:
            streams = self.hardware.streams
            with streams.a_core_each():
                of_parameters = self._students.gradients(received, streams.side_by_side)
            self._sgd.apply(of_parameters)
        del self._outputs, self._guarded
        if self._teachers_differ:
            # On the stream that steps the students, and after that step.
            with self.hardware.streams.side(), torch.no_grad():
                self._teachers.follow(self._students, self._decay)
        self.batches.advance()

    def mean(self) -> State:
        """End the round; return the plain mean of the bottoms, which no codec or policy changes."""
        self._count_round()
        return self._students.mean()

    def bottoms(self) -> dict[int, Cleared]:
        """End the round; return every active client's bottom as the server will hold it."""
        self._count_round()
        return {
            client: self.outgoing.bottom(self._sent, self._students.state(slot), slot)
            for slot, client in enumerate(self._plan.active)
        }

    def _count_round(self) -> None:
        """Count the bytes of all steps and of the trained bottoms at once: a captured step runs no Python."""
        wire, plan, clients = self.config.wire, self._plan, self.config.clients
        rows = (clients.batch, self._features)
        student, teacher, gradients = (
            plan.steps * codec_named(name).size(rows)
            for name in (wire.student_features, wire.teacher_features, wire.gradients)
        )
        for client in plan.active:
            self.traffic.add("features", "up", client, student + teacher)
            self.traffic.add("gradients", "down", client, gradients)
            self.traffic.add("model", "up", client, state_bytes(plan.bottom, wire.models))

    # --- a full-model round ----------------------------------------------------------------------

    @property
    def momenta(self) -> HostShelf:
        """Return the momentum of each client, if the run keeps it between full-model rounds."""
        return self._full.momenta

    def train(
        self,
        work: ClientWork,
        plan: FullRound,
        between: Callable[[], None] = lambda: None,
    ) -> list[ClientResult]:
        """Run a full-model round of ``work`` and return one result per active client.

        ``between`` is called on the host before every step, and may raise to end the round.
        """
        return self._full.train(work, plan, between)
