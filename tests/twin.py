"""The plain twin of a SemiSFL round: one module and one optimiser a client, and no tricks.

It is written straight from the algorithm as the oracle for every engine, and as what the engines'
speed is held against. It shares with the package only the draws (who is active, which images, how
they are augmented), the codecs' loss and the controller, each tested on its own.
"""

import copy
import time
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semisfl import seeds
from semisfl.algorithm.controller import Controller
from semisfl.algorithm.schedule import learning_rate
from semisfl.data.augment import Augmentation, Normalizer
from semisfl.data.batches import DrawnView, draw_view, make_view, split_views
from semisfl.data.dataset import Dataset
from semisfl.data.partition import Partition
from semisfl.data.positions import draw_batches
from semisfl.fleet.base import draw_active
from semisfl.fleet.codec import codec_named, roundtrip_state
from semisfl.models.layers import use_generator
from semisfl.models.split import SplitModel
from semisfl.settings.config import Config


def toy_data(
    images: int = 240,
    tests: int = 90,
    side: int = 16,
    channels: int = 1,
    classes: int = 3,
    seed: int = 0,
) -> Dataset:
    """Return noisy pictures whose class is the place of a bright bar."""
    rng = seeds.generator(seed, "toy")

    def draw(count: int) -> tuple[Tensor, Tensor]:
        labels = np.arange(count) % classes
        pixels = rng.normal(90, 30, (count, channels, side, side))
        width = side // classes
        for image, label in zip(pixels, labels, strict=True):
            image[:, label * width : (label + 1) * width] += 90
        return torch.from_numpy(pixels.clip(0, 255).astype(np.uint8)), torch.from_numpy(labels)

    train, train_labels = draw(images)
    test, test_labels = draw(tests)
    return Dataset(
        name="toy",
        classes=tuple(f"bar {number}" for number in range(classes)),
        images=train,
        labels=train_labels.long(),
        test_images=test,
        test_labels=test_labels.long(),
        mean=(0.4,) * channels,
        std=(0.2,) * channels,
    )


SMALL: dict[str, Any] = {
    "rounds": 3,
    "seed": 3,
    "data": {"labeled": 12, "partition": {"alpha": 0.5}, "augment": {"flip": False, "cutout": 4}},
    "clients": {"total": 5, "active": 3, "batch": 6, "steps": 3},
    "server": {"batch": 5, "steps": 4},
    "model": {"name": "cnn", "projection": 8},
    "optimizer": {"lr": 0.05, "lr_min": 0.01},
    "semisfl": {"queue_size": 16, "confidence_threshold": 0.4},
}
"""Settings of a run with `toy_data`."""


def bn_model(channels: int = 1, classes: int = 3, side: int = 16) -> nn.Sequential:
    """Return a small user's model with dropout, and BatchNorm on both sides of the cut."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(
            nn.Conv2d(channels, 6, 3, stride=2),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * ((side - 1) // 2 // 2 - 1) ** 2, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(16, classes),
        )


def plain(module: nn.Module) -> nn.Module:
    """``module`` with PyTorch's own Sequential for every one of the package, blocks' bodies included."""
    for name, child in module.named_children():
        setattr(module, name, plain(child))
    if not isinstance(module, nn.Sequential):
        return module
    return nn.Sequential(OrderedDict(module.named_children()))


class PlainQueue:
    """Lists of what was pushed, cut to the capacity. ``single`` starts full and is refilled with zeros."""

    def __init__(self, kind: str, capacity: int, width: int, seed: int) -> None:
        self.kind, self.capacity, self.width = kind, capacity, width
        random = torch.randn(capacity, width, generator=torch.Generator().manual_seed(seed))
        empty = self._rows(torch.zeros(0, width), -1, False)
        self.labeled = (
            empty if kind == "two_level" else self._rows(F.normalize(random, dim=1), -1, False)
        )
        self.pseudo = empty

    @staticmethod
    def _rows(keys: Tensor, label: int, flag: bool) -> tuple[Tensor, Tensor, Tensor]:
        return keys, torch.full((len(keys),), label), torch.full((len(keys),), flag)

    def _push(self, ring: tuple[Tensor, ...], new: tuple[Tensor, ...]) -> Any:
        joined = [torch.cat([old, rows]) for old, rows in zip(ring, new, strict=True)]
        return tuple(rows[max(0, len(rows) - self.capacity) :] for rows in joined)

    def push_labeled(self, keys: Tensor, labels: Tensor) -> None:
        # The single ring forgets that these are true labels: flag 0 keeps them from being positives.
        flags = torch.full((len(keys),), self.kind == "two_level")
        self.labeled = self._push(self.labeled, (keys, labels, flags))

    def push_pseudo(self, keys: Tensor, labels: Tensor, flags: Tensor) -> None:
        if self.kind == "single":
            self.labeled = self._push(self.labeled, (keys, labels, flags))
        else:
            self.pseudo = self._push(self.pseudo, (keys, labels, flags))

    def end_round(self) -> None:
        if self.kind == "single":
            self.labeled = self._rows(torch.zeros(self.capacity, self.width), -1, False)


def cluster_loss(z: Tensor, keys: Tensor, positive: Tensor, temperature: float) -> Tensor:
    """Return the loss summed over anchors; ``positive`` [n, r] says which references are positives of which anchor."""
    log_share = F.log_softmax(z @ keys.T / temperature, dim=1)
    return -((log_share * positive).sum(1) / positive.sum(1).clamp(min=1)).sum()


def follow(teacher: nn.Module, student: nn.Module, keep: float) -> None:
    source = student.state_dict()
    for name, tensor in teacher.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(keep * tensor + (1 - keep) * source[name])
        else:
            tensor.copy_(source[name])


class PlainTwin:
    def __init__(
        self, config: Config, model: SplitModel, data: Dataset, partition: Partition
    ) -> None:
        """``model`` gives the first weights and stays as it is."""
        self.config, self.data, self.partition = config, data, partition
        self.student = copy.deepcopy(model)
        for part in ("bottom", "top"):
            setattr(self.student, part, plain(getattr(self.student, part)))
        for tensor in (*self.student.parameters(), *self.student.buffers()):
            tensor.data = tensor.data.contiguous()
        self.teacher = copy.deepcopy(self.student).eval().requires_grad_(False)
        self.updates = 0
        self.dropout = torch.Generator()
        use_generator(self.student, self.dropout)
        self.queue = PlainQueue(
            config.semisfl.queue,
            config.semisfl.queue_size,
            model.keys,
            seeds.derive(config.seed, "queue"),
        )
        unlabeled = sum(len(shard) for shard in partition.clients)
        share = len(partition.labeled) / (len(partition.labeled) + unlabeled)
        self.controller = Controller(
            config.controller, config.server.steps, config.clients.steps, lambda: share
        )
        self.augmentation = Augmentation.of(config.data.augment)
        self.normalizer = Normalizer.of(data.mean, data.std)
        self.size = data.shape[1:]
        self.seconds: dict[str, list[float]] = defaultdict(list)
        """How long each step took, by phase; drawing and augmenting images not included."""

    def _images(self, planned: DrawnView, step: int) -> Tensor:
        made = make_view(self.data.images, planned[step : step + 1])
        return self.normalizer(made).contiguous()

    def _sgd(self, parameters: Any, lr: float) -> torch.optim.SGD:
        settings = self.config.optimizer
        return torch.optim.SGD(
            parameters,
            lr=lr,
            momentum=settings.momentum,
            nesterov=settings.momentum > 0,
            weight_decay=settings.weight_decay,
        )

    # --- S ---------------------------------------------------------------------------------------

    def _supervised(self, index: int, lr: float) -> float:
        config, steps = self.config, self.controller.supervised_steps
        labeled = self.partition.labeled
        rng = seeds.generator(config.seed, "labeled", index)
        batch = config.server.batch
        chosen = labeled[draw_batches(rng, len(labeled), steps, batch, least=100 * batch)]
        first, second = (
            draw_view(
                self.augmentation,
                config.labeled_view,
                chosen,
                self.size,
                config.seed,
                f"labeled-view{number}",
                index,
            )
            for number in (1, 2)
        )
        optimizer = self._sgd(self.student.parameters(), lr)
        total = 0.0
        for step in range(steps):
            images, others = self._images(first, step), self._images(second, step)
            labels = self.data.labels[torch.from_numpy(chosen[step])]
            started = time.perf_counter()
            loss = self._supervised_loss(images, others, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            self.updates += 1
            teacher = config.teacher
            keep = (
                min(1 - 1 / (self.updates + 1), teacher.ema_decay)
                if teacher.warmup
                else teacher.ema_decay
            )
            follow(self.teacher, self.student, keep)
            self.seconds["supervised"].append(time.perf_counter() - started)
            total += float(loss.detach())
        return total / steps

    def _supervised_loss(self, images: Tensor, others: Tensor, labels: Tensor) -> Tensor:
        method = self.config.semisfl
        self.student.train()
        features = self.student.bottom(images)
        loss = F.cross_entropy(self.student.top(features), labels)
        with torch.no_grad():
            keys = self.teacher.project(self.teacher.bottom(others))
        old_keys, old_labels, _ = self.queue.labeled
        self.queue.push_labeled(keys, labels)
        if not method.supervised_contrast:
            return loss
        z = self.student.project(features)
        references, their_labels = torch.cat([keys, old_keys]), torch.cat([labels, old_labels])
        if method.own_key:
            positive = labels[:, None] == their_labels
            total = cluster_loss(z, references, positive, method.temperature)
        else:
            total = torch.zeros(())
            for j in range(len(labels)):
                others = [a for a in range(len(references)) if a != j]
                positive = labels[j : j + 1, None] == their_labels[others]
                total = total + cluster_loss(
                    z[j : j + 1], references[others], positive, method.temperature
                )
        return loss + total / len(labels)

    # --- B, X, G ---------------------------------------------------------------------------------

    def _cross_entity(self, index: int, lr: float) -> dict[str, float]:
        config = self.config
        wire = config.wire
        active = draw_active(
            config.seed,
            index,
            config.clients.total,
            range(config.clients.total),
            config.clients.active,
        )
        bottoms, teachers, optimizers, views = [], [], [], []
        for client in active:
            bottom, teacher = copy.deepcopy(self.student.bottom), copy.deepcopy(self.teacher.bottom)
            bottom.load_state_dict(roundtrip_state(self.student.bottom.state_dict(), wire.models))
            teacher.load_state_dict(roundtrip_state(self.teacher.bottom.state_dict(), wire.models))
            for layer in teacher.modules():
                if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                    layer.train()
            seed = seeds.derive(config.seed, "dropout", index, client)
            use_generator(bottom, torch.Generator().manual_seed(seed))
            bottoms.append(bottom.train())
            teachers.append(teacher)
            optimizers.append(self._sgd(bottom.parameters(), lr))
            views.append(
                split_views(
                    self.augmentation,
                    self.partition.clients[client],
                    self.size,
                    config.clients.steps,
                    config.clients.batch,
                    config.seed,
                    index,
                    client,
                )
            )
        server = self._sgd(
            [*self.student.top.parameters(), *self.student.projector.parameters()], lr
        )
        sums: dict[str, float] = defaultdict(float)
        for step in range(config.clients.steps):
            strong = [self._images(view["strong"], step) for view in views]
            weak = [self._images(view["weak"], step) for view in views]
            started = time.perf_counter()
            sent = [bottom(images) for bottom, images in zip(bottoms, strong, strict=True)]
            with torch.no_grad():
                taught = [teacher(images) for teacher, images in zip(teachers, weak, strict=True)]
            student_features = [
                codec_named(wire.student_features).roundtrip(e.detach()) for e in sent
            ]
            teacher_features = [codec_named(wire.teacher_features).roundtrip(e) for e in taught]
            gradients = self._server_step(student_features, teacher_features, server, sums)
            for position in range(len(active)):
                received = codec_named(wire.gradients).roundtrip(gradients[position])
                optimizers[position].zero_grad()
                sent[position].backward(received)
                optimizers[position].step()
                if config.semisfl.client_teacher == "ema":
                    follow(teachers[position], bottoms[position], config.teacher.ema_decay)
            self.seconds["cross_entity"].append(time.perf_counter() - started)
        uploads = [roundtrip_state(bottom.state_dict(), wire.models) for bottom in bottoms]
        self.student.bottom.load_state_dict(plain_mean(uploads))
        self.queue.end_round()
        steps = config.clients.steps
        rows = len(active) * config.clients.batch * steps
        return {"loss_semi": sums["loss"] / steps, "mask_rate": 1 - sums["kept"] / rows}

    def _server_step(
        self,
        student_features: list[Tensor],
        teacher_features: list[Tensor],
        optimizer: torch.optim.SGD,
        sums: dict[str, float],
    ) -> list[Tensor]:
        """One step of w_s and w_p; the gradient of each client's own batch mean."""
        method = self.config.semisfl
        clients, batch = len(student_features), len(student_features[0])
        e = torch.cat(student_features).requires_grad_()
        with torch.no_grad():
            confidence, labels = self.teacher.top(torch.cat(teacher_features)).softmax(1).max(1)
            keys = self.teacher.project(torch.cat(teacher_features))
        threshold = method.confidence_threshold
        flags = (
            confidence >= threshold if method.confidence_rule == ">=" else confidence > threshold
        )
        self.student.train()
        losses = F.cross_entropy(self.student.top(e), labels, reduction="none")
        loss = losses[flags].sum() / len(labels)
        if method.clustering:
            z = self.student.project(e)
            served = [slice(0, clients * batch)]
            if method.server_pass == "in_turn":
                served = [slice(i * batch, (i + 1) * batch) for i in range(clients)]
            for rows in served:
                levels = zip(self.queue.labeled, self.queue.pseudo, strict=True)
                queued = [torch.cat(level) for level in levels]
                references = torch.cat([keys[rows], queued[0]])
                same = labels[rows, None] == torch.cat([labels[rows], queued[1]])
                positive = same & torch.cat([flags[rows], queued[2]])
                part = cluster_loss(z[rows], references, positive, method.temperature)
                loss = loss + part / len(labels)
                self.queue.push_pseudo(keys[rows], labels[rows], flags[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sums["loss"] += float(loss.detach())
        sums["kept"] += float(flags.sum())
        assert e.grad is not None
        return [rows * clients for rows in e.grad.split(batch)]

    def round(self, index: int) -> dict[str, float]:
        lr = learning_rate(self.config.optimizer, index, self.config.rounds)
        self.dropout.manual_seed(seeds.derive(self.config.seed, "dropout", index))
        row = {"loss_supervised": self._supervised(index, lr)}
        if index >= self.config.server.pretrain_rounds:
            row |= self._cross_entity(index, lr)
        self.controller.observe(row["loss_supervised"], row.get("loss_semi", 0.0), lr)
        return row


class ExactTwin(PlainTwin):
    """The same in float64. In float32 the twin rounds as well, and near a tie of ReLU or pooling that shows."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        for model in (self.student.double(), self.teacher.double()):
            model.project = partial(_project, model)  # type: ignore[method-assign]

    def _images(self, planned: DrawnView, step: int) -> Tensor:
        return super()._images(planned, step).double()


def _project(model: SplitModel, features: Tensor) -> Tensor:
    return F.normalize(model.projector(features), dim=1)


def plain_mean(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    mean = {}
    for name, first in states[0].items():
        total = torch.zeros_like(first, dtype=torch.float64)
        for state in states:
            total += state[name]
        mean[name] = (total / len(states)).to(first.dtype)  # a counter is truncated
    return mean


def largest_difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)


def mean_difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Return the mean difference over all numbers of a state."""
    total = sum(float((ours[name].double() - theirs[name].double()).abs().sum()) for name in ours)
    return total / sum(tensor.numel() for tensor in ours.values())
