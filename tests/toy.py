"""A small problem that the methods' tests share: four colours with noise, three uneven clients."""

import copy
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from semisfl.data.augment import Augmentation, Normalizer
from semisfl.data.batches import RoundBatches, ViewKind, draw_view, make_view
from semisfl.data.dataset import Dataset
from semisfl.data.labeled import LabeledImages
from semisfl.data.partition import Partition
from semisfl.fleet.base import ClientResult, ClientWork, Fleet, FullRound
from semisfl.models.build import uncut
from semisfl.models.split import SplitModel
from semisfl.runs import experiment
from semisfl.runs.pretrained import Pretrained
from semisfl.settings import config
from semisfl.settings.config import Config

CLASSES = 4
# Residual blocks with what can be computed as one (convolution, ReLU, pooling) and with BatchNorm.
RESIDUAL = """[
    {kind = "conv", channels = 6, stride = 2},
    {kind = "batchnorm"},
    {kind = "residual", body = [
        {kind = "conv", channels = 6, padding = 1},
        {kind = "relu"},
        {kind = "conv", channels = 6, padding = 1, bias = false},
        {kind = "batchnorm"},
    ]},
    {kind = "relu"},
    {kind = "residual", body = [
        {kind = "conv", channels = 8, padding = 1},
        {kind = "relu"},
        {kind = "pool"},
    ], shortcut = [
        {kind = "pool"},
        {kind = "conv", channels = 8, kernel = 1},
    ]},
    {kind = "flatten"},
    {kind = "linear", features = 16},
    {kind = "relu"},
    {kind = "linear"},
]"""

FLAT = [
    'model.layers=[{kind = "flatten"}, {kind = "linear", features = 16}, {kind = "relu"}, {kind = "linear"}]',
    "model.cut=3",
]
"""Settings of a run that is over soon, for tests that do not ask what is trained."""


class Doubled(nn.Module):
    """A layer that multiplies by a number that is in no state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.full((1,), 2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def dataset(count: int = 200, tests: int = 120, seed: int = 5) -> Dataset:
    rng = np.random.default_rng(seed)
    colours = np.array([[190, 70, 70], [70, 190, 70], [70, 70, 190], [170, 170, 60]])
    colours = colours.reshape(CLASSES, 3, 1, 1)

    def draw(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = np.arange(size) % CLASSES
        noise = rng.normal(0, 45, (size, 3, 12, 12))
        pixels = np.clip(colours[labels] + noise, 0, 255).astype(np.uint8)
        return torch.from_numpy(pixels), torch.from_numpy(labels)

    images, labels = draw(count)
    test_images, test_labels = draw(tests)
    names = tuple(f"colour{number}" for number in range(CLASSES))
    return Dataset(
        "toy", names, images, labels, test_images, test_labels, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
    )


def partition(data: Dataset) -> Partition:
    """16 labelled; client 0 holds every class, client 1 two, client 2 one."""
    labels = data.labels.numpy()
    rest = np.arange(16, len(labels))
    shares = [
        rest[rest % 3 == 0],
        rest[(rest % 3 == 1) & (labels[rest] < 2)],
        rest[(rest % 3 == 2) & (labels[rest] == 3)],
    ]
    return Partition(np.arange(16), tuple(shares))


def network(batchnorm: bool = False, dropout: bool = False) -> nn.Sequential:
    torch.manual_seed(7)
    layers: list[tuple[str, nn.Module]] = [("conv", nn.Conv2d(3, 6, 3, stride=2))]
    if batchnorm:
        layers.append(("bn", nn.BatchNorm2d(6)))
    layers += [("relu", nn.ReLU()), ("flatten", nn.Flatten()), ("fc1", nn.Linear(150, 16))]
    layers.append(("relu1", nn.ReLU()))
    if dropout:
        layers.append(("drop", nn.Dropout(0.3)))
    return nn.Sequential(OrderedDict([*layers, ("fc2", nn.Linear(16, CLASSES))]))


def start_from(
    model: SplitModel, weights: str, name: str, classes: tuple[str, ...] = ()
) -> list[str]:
    """Copy the weights that ``model.weights`` names into ``model``; return the layers that stay new."""
    return Pretrained.read(weights, name).copy_into(model, name, classes)


def own(model: nn.Module | None = None) -> dict[str, Any]:
    """Return everything that `train` takes besides settings; the network is new because it may be trained in place."""
    data = dataset()
    return {
        "data": data,
        "partition": partition(data),
        "model": model or network(),
        "device": "cpu",
    }


def but_for_time(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rounds without the metrics that differ between two equal runs."""
    return [{key: row[key] for key in row if not key.startswith("seconds")} for row in rows]


def residual_network() -> nn.Sequential:
    settings = values("semisfl", f"model.layers={RESIDUAL}")
    return uncut(settings.model.table, (3, 12, 12), CLASSES)


def values(method: str, *assignments: str) -> Config:
    base: dict[str, Any] = {
        "method": method,
        "rounds": 3,
        "data": {"name": "toy", "labeled": 16, "augment": {"cutout": 3}},
        "clients": {"total": 3, "active": 2, "batch": 8, "steps": 4},
        "server": {"batch": 8, "steps": 5},
        "model": {"projection": 8},
    }
    return config.parse(config.override(base, list(assignments)))


def assemble(
    method: str, *assignments: str, batchnorm: bool = False, dropout: bool = False
) -> experiment.Experiment:
    data = dataset()
    model = network(batchnorm, dropout)
    settings = values(method, *assignments)
    return experiment.assemble(settings, data, partition(data), model, device="cpu")


def numbered(batch: int, whole: bool = False) -> LabeledImages:
    """Return 30 images whose pixels and label are their number, unchanged by augmentation."""
    pixels = torch.arange(30, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 8, 8).contiguous()
    still = Augmentation(flip=False, pad=0, num_ops=0, cutout=0)
    normalizer = Normalizer.of((0.0,), (1 / 255,))
    batches = RoundBatches(pixels, still, normalizer, torch.float32, whole=whole)
    settings = config.parse({"server": {"batch": batch}, "seed": 4})
    return LabeledImages(batches, torch.arange(30), settings)


def views(
    settings: Config,
    view: ViewKind,
    purpose: str,
    places: np.ndarray,
    round_index: int,
    client: int,
) -> torch.Tensor:
    """What a client sees of its images at ``places``: the draws are a function of these arguments."""
    data, augmentation = dataset(), Augmentation.of(settings.data.augment)
    indices = partition(data).clients[client][places]
    planned = draw_view(
        augmentation, view, indices, (12, 12), settings.seed, purpose, round_index, client
    )
    images = Normalizer.of(data.mean, data.std)(make_view(data.images, planned))
    return images.reshape(*places.shape, 3, 12, 12)


def sgd(module: nn.Module, settings: Config, lr: float) -> torch.optim.SGD:
    """PyTorch's own optimiser with a run's settings."""
    chosen = settings.optimizer
    return torch.optim.SGD(
        module.parameters(),
        lr=lr,
        momentum=chosen.momentum,
        nesterov=chosen.momentum > 0,
        weight_decay=chosen.weight_decay,
    )


class Watched(NamedTuple):
    """A full-model round: what was asked for, as it was sent, and what came back."""

    work: ClientWork
    plan: FullRound
    results: list[ClientResult]


def watched(fleet: Fleet) -> list[Watched]:
    """Return a list to which each full-model round of ``fleet`` is added from now on."""
    train, rounds = fleet.train, list[Watched]()

    def watch(work: ClientWork, plan: FullRound) -> list[ClientResult]:
        sent = copy.deepcopy(plan)
        rounds.append(Watched(work, sent, train(work, plan)))
        return rounds[-1].results

    fleet.train = watch  # type: ignore[method-assign]
    return rounds


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=1e-4, atol=1e-6, msg=name)
