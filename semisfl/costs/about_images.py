"""The facts about a run's images that its costs depend on: shape, classes, and images per client."""

from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semisfl.files import read_json
from semisfl.models.shapes import Shape
from semisfl.runs import reading
from semisfl.settings import lookup
from semisfl.settings.config import Config

if TYPE_CHECKING:
    from semisfl.data.dataset import Dataset
    from semisfl.data.partition import Partition


@dataclass(frozen=True)
class AboutImages:
    """Shape, classes and counts of a run's images."""

    shape: Shape
    classes: int
    mean: float
    """Mean number of images per client."""
    each: Mapping[int, int] = field(default_factory=dict)
    """Images by client, if known."""

    @classmethod
    def of_each(cls, shape: Shape, classes: int, each: Mapping[int, int]) -> "AboutImages":
        """Return the facts if every client's number of images is known."""
        return cls(shape, classes, sum(each.values()) / max(1, len(each)), each)

    def of(self, client: int) -> float:
        """Return the number of a client's images, or the mean if it is unknown."""
        return self.each.get(client, self.mean)


def planned(config: Config) -> AboutImages:
    """Return the facts for a run that has not begun; images are loaded only if the catalog lacks them."""
    name, side = config.data.name, config.data.size
    folders: Mapping[str, Sized] | None = None
    if (known := lookup.DATA.find(name)) and known.images is not None:
        shape, classes, images = known.shape, known.classes, known.images
    else:
        from semisfl.data import sources

        data = sources.load(name, size=side)
        shape, classes, images = data.shape, len(data.classes), len(data.images)
        folders = data.clients
    shape = (shape[0], side, side) if side else shape
    if config.data.unlabeled is None and folders:
        each = {client: len(rows) for client, rows in enumerate(folders.values())}
        return AboutImages.of_each(shape, classes, each)
    set_aside = round(images * (config.data.validation or 0.0))
    left = max(0, images - set_aside - config.data.labeled)
    if (elsewhere := config.data.unlabeled) is not None:
        left = _images_of(elsewhere)
    return AboutImages(shape, classes, left / config.clients.total)


def _images_of(name: str) -> int:
    """Return the number of training images of a named set, or at a path."""
    if (known := lookup.DATA.find(name)) and known.images is not None:
        return known.images
    from semisfl.data import sources

    return len(sources.load(name, size=8, tested=False).images)


def loaded(data: "Dataset", partition: "Partition") -> AboutImages:
    """Return the facts about images that are loaded."""
    each = {client: len(images) for client, images in enumerate(partition.clients)}
    return AboutImages.of_each(data.shape, len(data.classes), each)


def recorded(config: Config, path: Path) -> AboutImages:
    """Return the facts that a run directory holds; the rest is as `planned`."""
    return of_run(config, reading.read_images(path), _held(path))


def of_run(
    config: Config, described: Mapping[str, Any] | None, each: Mapping[int, int]
) -> AboutImages:
    """Return the facts from a run's description of its images and its images by client, where known."""
    if described is None:
        images = planned(config)
    else:
        channels, height, width = described["shape"]
        shape, classes = (channels, height, width), len(described["classes"])
        images = AboutImages(shape, classes, (described["unlabeled"] or 0) / config.clients.total)
    return AboutImages.of_each(images.shape, images.classes, each) if each else images


def _held(path: Path) -> dict[int, int]:
    """Return images by client: a simulation records them, and devices of a network report them."""
    if clients := reading.read_holdings(path).get("clients", []):
        return {client: sum(counts) for client, counts in enumerate(clients)}
    devices = read_json(path / "fleet.json").get("clients", [])
    return {device["client"]: device["images"] for device in devices if device.get("images")}
