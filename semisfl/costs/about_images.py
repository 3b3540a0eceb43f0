"""What must be known of a run's images to price it: their shape, the classes, who holds how many."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from semisfl.models.split import Shape
from semisfl.runs import reading
from semisfl.settings import lookup
from semisfl.settings.config import Config


@dataclass(frozen=True)
class AboutImages:
    shape: Shape
    classes: int
    mean: float
    """Images that a client holds on average."""
    each: Mapping[int, int] = field(default_factory=dict)
    """By client, where it is known."""

    def of(self, client: int) -> float:
        return self.each.get(client, self.mean)


def planned(config: Config) -> AboutImages:
    """Of a run that has not begun; images are loaded only where nothing else says what they are."""
    name, side = config.data.name, config.data.size
    if (known := lookup.data_set(name)) and known.images is not None:
        shape, classes, images = known.shape, known.classes, known.images
    else:
        from semisfl.data import sources

        data = sources.load(name, size=side)
        shape, classes, images = data.shape, len(data.classes), len(data.images)
    shape = (shape[0], side, side) if side else shape
    set_aside = round(images * (config.data.validation or 0.0))
    left = max(0, images - set_aside - config.data.labeled)
    if (elsewhere := config.data.unlabeled) is not None:
        left = _images_of(elsewhere)
    return AboutImages(shape, classes, left / config.clients.total)


def _images_of(name: str) -> int:
    """Training images of a named set, or at a path."""
    if (known := lookup.data_set(name)) and known.images is not None:
        return known.images
    from semisfl.data import sources

    return len(sources.load(name, size=8, tested=False).images)


def recorded(config: Config, path: Path) -> AboutImages:
    """Return what a run directory or record says of its images; the rest as `planned`."""
    each = _held(path)
    described = reading.read_images(path)
    if described is None:
        found = planned(config)
    else:
        channels, height, width = described["shape"]
        shape, classes = (channels, height, width), len(described["classes"])
        found = AboutImages(shape, classes, (described["unlabeled"] or 0) / config.clients.total)
    if not each:
        return found
    return AboutImages(found.shape, found.classes, sum(each.values()) / len(each), each)


def _held(path: Path) -> dict[int, int]:
    """Return images by client: a simulation writes them down, devices of a network say it themselves."""
    if clients := reading.read_holdings(path).get("clients", []):
        return {client: sum(counts) for client, counts in enumerate(clients)}
    devices = reading.read_json(path / "fleet.json").get("clients", [])
    return {device["client"]: device["images"] for device in devices if "images" in device}
