"""Load the images that a configuration names, and divide them among the server and the clients.

A `Dataset` holds all images; a `Partition` holds indices into its training images: those that the server has with
labels, those of each client without, and those that rounds are judged on. Real devices bring their own images, so a
server's partition has no clients.
"""

import logging
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from semisfl.data import npz, partition as partitions, sources
from semisfl.data.dataset import Dataset
from semisfl.data.partition import Partition
from semisfl.settings.config import Config, ConfigError
from semisfl.settings.counts import plural

log = logging.getLogger(__name__)


def load_data(config: Config, passed: Partition | None = None) -> tuple[Dataset, Partition]:
    """Return the images that a configuration names, and their partition: the one ``passed``, if any.

    With ``data.unlabeled`` the clients hold images of a second place; these follow the server's in the result. May
    download a known data set. Raises `ConfigError` for images that cannot be divided as configured.
    """
    data = load_images(config.data.name, config)
    if config.data.unlabeled is not None:
        others = load_images(config.data.unlabeled, config, like=data)
        data = sources.join(data, others)
    return data, passed or divide(config, data)


def chosen(data: Dataset, places: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return the training images at ``places`` and their labels."""
    index = torch.from_numpy(places)
    return data.images[index], data.labels[index]


def as_passed(config: Config, data: Dataset | None, partition: Partition | None) -> Config:
    """Return ``config`` with the name of the images and the number of labelled ones that a program passes.

    So a run's config.toml says what was used, not what was configured. A path of images of that name stays, and a
    passed partition is recorded as ``data.partition.kind = "own"``.
    """
    if partition is not None:
        own = config.data.partition.model_copy(update={"kind": "own"})
        passed = config.data.model_copy(
            update={"labeled": len(partition.labeled), "partition": own}
        )
        config = config.model_copy(update={"data": passed})
    named = Path(config.data.name)
    if data is None or data.name in (named.name, npz.group(named)[0]):
        return config
    passed = config.data.model_copy(update={"name": data.name, "unlabeled": None})
    return config.model_copy(update={"data": passed})


def check_partition(config: Config, partition: Partition, data: Dataset) -> None:
    """Raise ValueError for a partition that does not fit the number of clients or the images.

    Each image may have one place: labelled, for validation, or of one client. Labelled images need known labels of at
    least two classes; a class without one is a warning. Devices bring their own images.
    """
    simulated = config.fleet.kind != "network" and config.data.features is None
    if simulated and (clients := len(partition.clients)) != config.clients.total:
        raise ConfigError(
            f"the data has {plural(clients, 'client')} but clients.total = {config.clients.total}; set clients.total = {clients}"
            + f" and clients.active = {clients}" * (clients < config.clients.active)
        )
    if simulated and not all(map(len, partition.clients)):
        raise ValueError("the partition gives a client no images; leave the client out")
    held = [partition.labeled, partition.validation, *partition.clients]
    images, counts = np.unique(np.concatenate(held), return_counts=True)
    if len(twice := images[counts > 1]):
        raise ValueError(
            f"the partition names image {twice[0]} twice; name each image once: labelled, for validation, or "
            "of one client"
        )
    labels = data.labels.numpy()
    known = np.concatenate([partition.labeled, partition.validation])
    if len(unknown := known[labels[known] < 0]):
        raise ValueError(
            f"the partition has image {unknown[0]} as labelled or for validation, but its label is unknown (-1); "
            "leave it out"
        )
    there = set(labels[partition.labeled].tolist())
    missing = [name for number, name in enumerate(data.classes) if number not in there]
    if len(there) < 2:
        raise ValueError(
            f"the partition's labelled images need two classes or more; give the server one of {missing[0]!r} too"
        )
    if missing:
        log.warning("the server has no labelled image of %s", ", ".join(missing[:5]))


def load_images(name: str, config: Config, like: Dataset | None = None) -> Dataset:
    """Load images by name or path, at the configured size, or at the size of ``like``.

    Images ``like`` others have their classes too and need no test images. What was left out or resized is logged.
    """
    data = sources.load(name, size=config.data.size, like=like, tested=like is None)
    for note in data.notes:
        log.warning("%s", note)
    return data


def check_classes(data: Dataset) -> None:
    """Raise `ConfigError` for images without any class: their folder has another layout than training needs."""
    if not data.classes:
        raise ConfigError(
            f"{data.name} holds no labelled images; a folder needs <class>/*, or train/<class>/* and test/<class>/*, "
            "a CSV file a label in some lines"
        )


def divide(config: Config, data: Dataset) -> Partition:
    """Divide the images: some for validation, labelled ones for the server, the others for the clients.

    The division follows from the configuration and its seed. Validation images are set aside first, the same ones
    however many labels or clients there are, so that runs that differ in those are judged alike. Of devices the server
    knows nothing: all its labelled images are its own. Raises `ConfigError` for images that cannot be divided so.
    """
    check_classes(data)
    validation = partitions.NONE
    if config.data.validation is not None:
        validation = partitions.set_aside(data, config.data.validation, config.seed)
    if config.fleet.kind == "network":
        for key in ("unlabeled", "features"):
            if (place := getattr(config.data, key)) is not None:
                raise ConfigError(
                    f"data.{key} = {place!r} is for simulated clients; devices bring their own images: leave it out"
                )
        # The clients have images of their own: all that is here is the server's.
        known = np.setdiff1d(np.flatnonzero(data.labels.numpy() >= 0), validation)
        return Partition(known, (), validation)
    if config.data.features is not None:
        return partitions.server_alone(data, config.data.labeled, config.seed, validation)
    kind = config.data.partition.kind
    if kind == "own":
        raise ConfigError(
            "data.partition.kind = 'own': a program divided these images; pass its Partition to semisfl.train "
            "or resume, or use iid, dirichlet or folders"
        )
    if kind == "folders" or data.clients is not None:
        return partitions.split_by_folder(data, config.data.labeled, config.seed, validation)
    return partitions.split(
        data.labels.numpy(),
        labeled=config.data.labeled,
        clients=config.clients.total,
        kind=kind,
        alpha=config.data.partition.alpha,
        seed=config.seed,
        classes=len(data.classes),
        served=data.served,
        validation=validation,
    )
