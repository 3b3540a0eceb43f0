"""Compare encoding and training with a frozen bottom with plain PyTorch loops, by turns in one process.

    python -m reproduction bench frozen frozen:mobilenet-v2 [--device cuda]

Both loops compute the same: the same bottom in the same passes, the same top, head and batches, in the same precision.
"""

import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from reproduction.benchmarks.rounds import synthetic
from semisfl.data.fixed_views import content_digest
from semisfl.fleet.frozen import FrozenFleet
from semisfl.fleet.rows import TOGETHER, TOGETHER_CPU
from semisfl.methods.semisfl_settings import SemiSFLSettings
from semisfl.models.build import build_model
from semisfl.runs.experiment import Experiment, assemble
from semisfl.settings import config, presets
from tests.twin import plain

MODEL, SIDE = "efficientnet-lite0", 112
STEPS, IMAGES = {"cpu": 3, "cuda": 100}, {"cpu": 300, "cuda": 12_000}
"""Steps per round, and the most images: a CPU takes a minute for 300."""


def by_turns(ours: Callable[[], None], plain: Callable[[], None], rounds: int) -> dict[str, float]:
    """Return the median seconds of both, and how many times faster ``ours`` is; the first two rounds warm up."""
    seconds: dict[str, list[float]] = {"ours": [], "plain": []}
    for _ in range(rounds + 2):
        for name, run in (("ours", ours), ("plain", plain)):
            started = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - started)
    medians = {name: median(times[2:]) for name, times in seconds.items()}
    return {**medians, "times_faster": medians["plain"] / medians["ours"]}


def encoding(experiment: Experiment, count: int, rounds: int) -> dict[str, float]:
    """Compare encoding ``count`` images, from pixels to packed rows, with passing as many images as there are views."""
    fleet = experiment.fleet
    assert isinstance(fleet, FrozenFleet)
    clients, bottom = fleet.clients, fleet.clients.bottom
    images = clients.images_at(0, 0, count)
    digests = [content_digest(image) for image in images.cpu()]
    views = images.repeat_interleave(sum(fleet.config.clients.views.values()), 0)
    together = TOGETHER_CPU if images.device.type == "cpu" else TOGETHER

    def ours() -> None:
        for first in range(0, count, TOGETHER):
            clients.encode((0, "0", first, digests[first : first + TOGETHER])).cpu()

    @torch.inference_mode()
    def plainly() -> None:
        for batch in views.split(together):
            bottom(experiment.normalizer(batch)).cpu()

    return by_turns(ours, plainly, rounds)


class PlainLoop:
    """The client steps of a round of SemiSFL, written plainly: rows lie in tensors, and the queue is one of them."""

    def __init__(self, experiment: Experiment) -> None:
        """Make models of PyTorch's own layers for the same settings."""
        options, device = experiment.config, experiment.hardware.device
        shape, classes = experiment.description.shape, len(experiment.description.classes)
        self._student, self._teacher = (build_model(options, shape, classes) for _ in range(2))
        for model in (self._student, self._teacher):
            model.top, model.projector = plain(model.top), plain(model.projector)
            model.to(device).eval()
        self._hardware, self._clients = experiment.hardware, options.clients
        self._settings = options.settings(SemiSFLSettings)
        trained = [*self._student.top.parameters(), *self._student.projector.parameters()]
        self._optimizer = torch.optim.AdamW(trained, options.optimizer.lr)
        rows = (2000, self._student.features)
        self._weak, self._strong = (torch.randn(rows, device=device) for _ in range(2))
        keys = torch.randn(self._settings.queue_size, self._student.keys, device=device)
        self._keys = F.normalize(keys)
        self._labels = torch.zeros(len(keys), dtype=torch.long, device=device)

    def round(self) -> None:
        """Take the steps."""
        for _ in range(self._clients.steps):
            count = self._clients.active * self._clients.batch
            drawn = torch.randint(len(self._weak), (count,), device=self._weak.device)
            with self._hardware.arithmetic():
                loss = self._loss(self._weak[drawn], self._strong[drawn])
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()

    def _loss(self, weak: Tensor, strong: Tensor) -> Tensor:
        with torch.no_grad():
            logits, keys = self._teacher.outputs(weak)
            confidence, labels = logits.softmax(1).max(1)
            confident = confidence > float(self._settings.confidence_threshold)
        logits, z = self._student.train().outputs(strong)
        consistency = (F.cross_entropy(logits, labels, reduction="none") * confident).mean()
        all_keys, all_labels = torch.cat([keys, self._keys]), torch.cat([labels, self._labels])
        positive = labels[:, None] == all_labels
        shares = F.log_softmax(z @ all_keys.T / self._settings.temperature, dim=1)
        clusters = -((shares * positive).sum(1) / positive.sum(1).clamp(min=1)).mean()
        self._keys, self._labels = (
            one[: len(self._keys)] for one in (all_keys.float(), all_labels)
        )
        return consistency + clusters


def training(experiment: Experiment, rounds: int) -> dict[str, float]:
    """Compare a round's client steps on stored rows, which are drawn and copied first, with a `PlainLoop`."""
    method: Any = experiment.method
    method.round(0)  # the clients encode their images, and the queue fills

    def ours() -> None:
        method.active = method.setup.active(0)
        method.fleet.start_round(method._plan(0, 1e-3))
        for _ in range(experiment.config.clients.steps):
            method.cross_entity_step()

    return by_turns(ours, PlainLoop(experiment).round, rounds)


def timed(item: str, device: str, images: int, rounds: int, turn: Connection) -> dict[str, Any]:
    """Return both comparisons of ``frozen`` or ``frozen:MODEL``; the other arguments are those of `rounds.timed`.

    The settings are those of the preset ``photos`` at `SIDE` pixels with random weights.
    """
    place = "cuda" if device.startswith("cuda") else "cpu"
    model = item.partition(":")[2] or MODEL
    settings = [f"model.name={model}", "model.weights=none", f"data.size={SIDE}"]
    settings += ["data.partition.kind=iid", "data.validation=none", "optimizer.kind=adamw"]
    settings += [f"clients.steps={STEPS[place]}", "server.steps=2"]
    options = config.parse(config.override(presets.values_of("photos"), settings))
    data = synthetic((3, SIDE, SIDE), min(images, IMAGES[place]), 100)
    experiment = assemble(options, data, device=device)
    experiment.fleet.open(None)
    turn.send("ready")
    turn.recv()
    trained = training(experiment, rounds)
    # The views of 8 images fill whole passes, as those of a client with many images do.
    count = min(experiment.fleet.image_counts().values()) // 8 * 8
    encoded = encoding(experiment, count, rounds)
    experiment.fleet.close(finished=True)
    sizes = {"steps": options.clients.steps, "images_encoded": count}
    return {"item": item, **sizes, "training": trained, "encoding": encoded}
