"""A configuration's pieces, put together: data, model, clients and method."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from semisfl import models, seeds
from semisfl.config import Config
from semisfl.data import partition as partitions
from semisfl.data import sources
from semisfl.data.augment import Augmentation, Normalizer
from semisfl.data.batches import RoundBatches
from semisfl.data.partition import Partition
from semisfl.data.sources import Dataset
from semisfl.engine.hardware import Hardware
from semisfl.fleet.base import Fleet
from semisfl.fleet.local import LocalFleet
from semisfl.methods import METHODS
from semisfl.methods.base import LabeledImages, Method, Setup
from semisfl.stopping import StopFlag

log = logging.getLogger(__name__)
TEST_BATCH = 500


@dataclass
class Experiment:
    """A configuration's pieces, put together."""

    config: Config
    method: Method
    fleet: Fleet
    hardware: Hardware
    stop: StopFlag
    normalizer: Normalizer
    test_images: Tensor
    test_labels: Tensor

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Test accuracy in percent of each tested model."""
        accuracies = {}
        for name, model in self.method.tested().items():
            mode = model.training
            model.eval()
            hits = torch.zeros((), device=self.hardware.device)
            with self.hardware.arithmetic():
                for images, labels in zip(
                    self.test_images.split(TEST_BATCH),
                    self.test_labels.split(TEST_BATCH),
                    strict=True,
                ):
                    hits += (
                        model(self.normalizer(images, self.hardware.dtype)).argmax(1) == labels
                    ).sum()
            model.train(mode)
            accuracies[name] = 100 * float(hits) / len(self.test_labels)
        return accuracies


def load_data(config: Config) -> tuple[Dataset, Partition]:
    """The images a configuration names and who holds which."""
    data = sources.load(config.data.name, size=config.data.size)
    for note in data.notes:
        log.warning("%s", note)
    return data, divide(config, data)


def divide(config: Config, data: Dataset) -> Partition:
    """Labelled images for the server, the others for the clients."""
    kind = config.data.partition.kind
    if kind == "folders" or data.clients is not None:
        return partitions.by_folder(data, labeled=config.data.labeled, seed=config.seed)
    return partitions.split(
        data.labels.numpy(),
        labeled=config.data.labeled,
        clients=config.clients.total,
        kind=kind,
        alpha=config.data.partition.alpha,
        seed=config.seed,
        classes=len(data.classes),
    )


def assemble(
    config: Config,
    data: Dataset | None = None,
    partition: Partition | None = None,
    model: nn.Sequential | None = None,
    device: str = "auto",
    make_fleet: Callable[..., Fleet] = LocalFleet,
    stop: StopFlag | None = None,
) -> Experiment:
    """Everything a run needs. ``data``, ``partition`` and ``model`` replace what the configuration names."""
    hardware, stop = Hardware(device, config.runtime), stop or StopFlag()
    if data is None:
        data, loaded = load_data(config)
        partition = partition or loaded
    elif partition is None:
        partition = divide(config, data)
    if len(partition.clients) != config.clients.total:
        raise ValueError(
            f"the data has {len(partition.clients)} clients but clients.total = {config.clients.total}; "
            f"set clients.total = {len(partition.clients)}"
        )
    shape = (data.images.shape[1], data.images.shape[2], data.images.shape[3])
    split_model = build_model(config, model, shape, len(data.classes)).to(hardware.device)
    images, labels = data.images.to(hardware.device), data.labels.to(hardware.device)
    augment = config.data.augment
    augmentation = Augmentation(
        flip=augment.flip, pad=augment.pad, num_ops=augment.operations, cutout=augment.cutout
    )
    normalizer = Normalizer.of(data.mean, data.std).to(hardware.device)
    chosen = torch.from_numpy(partition.labeled).to(hardware.device)
    batches = RoundBatches(
        images[chosen], augmentation, normalizer, hardware.dtype, whole=hardware.capture
    )
    labeled = LabeledImages(batches, labels[chosen], config, hardware)
    fleet = make_fleet(
        split_model,
        images,
        labels,
        partition.clients,
        config,
        augmentation,
        normalizer,
        hardware,
        stop,
    )
    unlabeled = sum(len(shard) for shard in partition.clients)
    share = len(labeled) / (len(labeled) + unlabeled)
    setup = Setup(config, split_model, fleet, labeled, len(data.classes), share, hardware, stop)
    return Experiment(
        config,
        METHODS[config.method].make(setup),
        fleet,
        hardware,
        stop,
        normalizer,
        data.test_images.to(hardware.device),
        data.test_labels.to(hardware.device),
    )


def build_model(
    config: Config, model: nn.Sequential | None, shape: models.Shape, classes: int
) -> models.SplitModel:
    settings = config.model
    seed = seeds.derive(config.seed, "model")
    if model is None:
        return models.build(
            settings.table,
            shape,
            classes,
            cut=settings.cut,
            projector=settings.projector,
            projection=settings.projection,
            seed=seed,
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return models.split(model, shape, settings.cut, settings.projector, settings.projection)
