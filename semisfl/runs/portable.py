"""Describe a model inside its checkpoint, so that the file alone suffices to use it.

A checkpoint holds what the next round needs. Its entry ``model`` also has the weights of the network
that the run is judged by (the first that its method tests) and a `Description`. Weights that the
checkpoint already has are not written twice.
"""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from semisfl.data.dataset import Dataset
from semisfl.data.partition import Partition
from semisfl.models.modules import layers_of
from semisfl.models.zoo import MODELS
from semisfl.runs.run_data import chosen
from semisfl.settings.config import Config, ConfigError
from semisfl.settings.lookup import origin_of
from semisfl.settings.sections import one_line
from semisfl.settings.version import VERSION

log = logging.getLogger(__name__)

PARTS = ("bottom", "top")
DIGESTS = {
    "labeled": "labelled images",
    "judged": "images that rounds are judged on",
    "images": "training and test images",
}
"""Names of the `Description.digests` for messages."""
MOST_HASHED = 1 << 26
"""Most bytes of pixels that a digest covers, so that it takes a fraction of a second."""


@dataclass(frozen=True)
class Description:
    """Everything about a model except its weights."""

    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    """Channels, height and width of an image."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    layers: list[dict[str, Any]] | None
    """The whole model as a table; None: the user passed code that no table describes."""
    cut: int | str | None
    method: str
    network: str
    """The name of this network in the method; the run's ``accuracy`` is measured with it."""
    data: str
    labeled: int
    unlabeled: int | None
    """None: the images are on devices and were not counted."""
    tested_on: int
    settings: dict[str, Any]
    """The settings of the run, without the path of its data."""
    version: str
    judged_on: str = "test"
    """The images that ``accuracy`` is measured on: ``test`` or ``validation``."""
    accuracy: float | None = None
    """Accuracy on the ``tested_on`` images, in percent; None: not tested yet."""
    test_accuracy: float | None = None
    """Accuracy on the test set, which a run judged on validation images reads only at its end."""
    macro_f1: float | None = None
    recall_by_class: list[float | None] | None = None
    """Measured on the same images as ``accuracy``; None: an older version tested it."""
    tested_after: int = 0
    """Rounds done when the model was tested."""
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes sent between server and clients in training, by kind and direction."""
    bottom_layers: list[dict[str, Any]] | None = None
    """The bottom as a table where the top alone is code."""
    new_layers: tuple[str, ...] = ()
    """Layers that did not begin with ``model.weights``, where a run has weights."""
    digests: dict[str, str] = field(default_factory=dict)
    """SHA-256 of pixels and labels: of the ``labeled`` images, and of those that ``accuracy`` is ``judged`` on.

    That of all ``images`` covers evenly spaced pixels of a large set.
    """

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Description":
        """Return the description from plain values; ignore keys of later versions.

        Raises `TypeError` for values of a file that nobody here wrote.
        """
        known = {key: values[key] for key in cls.__dataclass_fields__ if key in values}
        try:
            return _checked().validate_python(known)
        except ValidationError as error:
            raise TypeError(one_line(error, cls, list(cls.__dataclass_fields__))) from error


@cache
def _checked() -> TypeAdapter[Description]:
    return TypeAdapter(Description)


def describe(
    config: Config, data: Dataset, partition: Partition, network: str, own: nn.Sequential | None
) -> Description:
    """Return the description of the model that a run trains, before its first test.

    ``network`` is the name of the tested model in the method; ``own`` is a model that a program passed.
    """
    judged = data.test_images, data.test_labels
    if len(partition.validation):
        judged = chosen(data, partition.validation)
    settings = config.model_dump(mode="json")
    features = config.data.features
    settings["data"] |= {"name": data.name, "features": features and Path(features).name}
    layers = settings["model"].pop("layers")
    if settings["model"]["weights"] is not None:
        settings["model"] |= {
            "weights": Path(settings["model"]["weights"]).name,
            "origin": origin_of(settings["model"]["weights"]),
        }
    return Description(
        classes=data.classes,
        shape=data.shape,
        mean=tuple(data.mean),
        std=tuple(data.std),
        layers=_table(config, own),
        cut=config.model.cut,
        method=config.method,
        network=network,
        data=data.name,
        labeled=len(partition.labeled),
        unlabeled=sum(map(len, partition.clients)) if partition.clients else None,
        tested_on=len(judged[0]),
        judged_on="validation" if len(partition.validation) else "test",
        settings=settings,
        version=VERSION,
        bottom_layers=layers if config.model.is_code else None,
        digests={
            "labeled": _digest(*chosen(data, partition.labeled)),
            "judged": _digest(*judged),
            "images": data_digest(data),
        },
    )


def _digest(images: Tensor, labels: Tensor) -> str:
    """Return the SHA-256 of a shape, pixels and labels."""
    digest = hashlib.sha256(str(tuple(images.shape)).encode())
    for tensor in (images, labels):
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


def data_digest(data: Dataset) -> str:
    """Return the SHA-256 of classes, labels and pixels: of a large set, those of evenly spaced images."""
    parts = [
        _digest(images[:: _stride(len(images), images)], labels)
        for images, labels in (
            (data.images, data.labels),
            (data.test_images, data.test_labels),
        )
    ]
    return hashlib.sha256(str((data.classes, parts)).encode()).hexdigest()


def _stride(count: int, images: Tensor) -> int:
    """Return the step at which ``count`` images have at most `MOST_HASHED` bytes."""
    return max(1, -(-count * images[:1].numel() // MOST_HASHED))


def check_images(before: Mapping[str, Any], now: Mapping[str, Any], *, may_grow: bool) -> None:
    """Raise ConfigError if a run would be resumed with other images than it began with.

    ``before`` and ``now`` are descriptions of the model. ``may_grow``: images may have been added on the server or the
    devices, so only other classes, shapes and normalisations are errors; other images to judge rounds on are a warning.
    """
    for key in ("classes", "shape", "mean", "std"):
        if tuple(before[key]) != tuple(now[key]):
            raise ConfigError(
                f"the run began with images whose {key} is {tuple(before[key])}, and now it is {tuple(now[key])}; "
                "continue it with the images it had"
            )
    for key, kind in DIGESTS.items():
        digest = now["digests"].get(key)
        if before["digests"].get(key, digest) == digest:
            continue
        if not may_grow:
            raise ConfigError(
                f"the {kind} are not those that the run began with; continue it with the images it had, or "
                "start a new run"
            )
        if key == "judged":
            log.warning(
                "the %s are not those that the run began with: accuracies before and after do not compare",
                kind,
            )


def _table(config: Config, own: nn.Sequential | None) -> list[dict[str, Any]] | None:
    """Return the whole model as a table of layers; None if it is code that no table describes."""
    if own is not None:
        try:
            return layers_of(own)
        except ValueError:
            return None
    table = config.model.layers or MODELS[config.model.name].table()
    return [layer.model_dump(mode="json") for layer in table]


def answering_weights(network: nn.Module) -> dict[str, Tensor]:
    """Return the weights needed for inference, ``bottom.*`` and ``top.*``, without the projection head."""
    prefixes = tuple(f"{part}." for part in PARTS)
    return {
        name: tensor for name, tensor in network.state_dict().items() if name.startswith(prefixes)
    }
