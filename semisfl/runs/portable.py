"""What travels with a model: its checkpoint alone says what it is, what it takes and what it answers.

A checkpoint holds what the next round needs; under ``model`` it also names the weights of the
network that the run is judged by (the first that its method tests), and all that whoever wants an
answer from it must know. Weights that are in the checkpoint anyway are not written twice.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor, nn

from semisfl.data.partition import Partition
from semisfl.data.sources import Dataset
from semisfl.models.modules import layers_of
from semisfl.models.zoo import MODELS
from semisfl.settings.config import Config
from semisfl.settings.version import VERSION

PARTS = ("bottom", "top")


@dataclass(frozen=True)
class Description:
    """All of a model but its weights."""

    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    """Of an image: channels, height, width."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    layers: list[dict[str, Any]] | None
    """The whole model as a table; None: it was given as code that no table describes."""
    cut: int | str | None
    method: str
    network: str
    """Which of the method's networks this is: what a run's ``accuracy`` is measured with."""
    data: str
    labeled: int
    unlabeled: int | None
    """None: they are on devices, and nobody here has counted them."""
    tested_on: int
    settings: dict[str, Any]
    """The run's, without where on its machine the data lay."""
    version: str
    judged_on: str = "test"
    """Whether ``accuracy`` is that on the test set's images or on ``validation`` images."""
    accuracy: float | None = None
    """On the ``tested_on`` images, in percent; None: not tested yet."""
    test_accuracy: float | None = None
    """On the test set, which a run judged on validation images reads at its end alone."""
    tested_after: int = 0
    """So many rounds."""
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes that crossed between server and clients in training, by kind and direction."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Description":
        """From plain values; what a later version adds is passed over."""
        tuples = {key: tuple(values[key]) for key in ("classes", "shape", "mean", "std")}
        known = {key: values[key] for key in cls.__dataclass_fields__ if key in values}
        return cls(**{**known, **tuples})


def describe(
    config: Config, data: Dataset, partition: Partition, network: str, own: nn.Sequential | None
) -> Description:
    """Of the model that a run trains; ``own`` is one that was given beside its configuration."""
    settings = config.model_dump(mode="json")
    settings["data"]["name"] = data.name
    settings["model"].pop("layers")
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
        tested_on=len(partition.validation) or len(data.test_labels),
        judged_on="validation" if len(partition.validation) else "test",
        settings=settings,
        version=VERSION,
    )


def _table(config: Config, own: nn.Sequential | None) -> list[dict[str, Any]] | None:
    if own is not None:
        try:
            return layers_of(own)
        except ValueError:
            return None
    table = config.model.layers or MODELS[config.model.name].table()
    return [layer.model_dump(mode="json") for layer in table]


def answering_weights(network: nn.Module) -> dict[str, Tensor]:
    """The weights that an answer needs, named ``bottom.*`` and ``top.*``: no projection head."""
    prefixes = tuple(f"{part}." for part in PARTS)
    return {
        name: tensor for name, tensor in network.state_dict().items() if name.startswith(prefixes)
    }
