"""What must be known of a run's images to price it: their shape, the classes, who holds how many."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from semisfl.models.split import Shape
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


def recorded(config: Config, directory: Path) -> AboutImages:
    """Of a run that left its ``directory``, as far as that says; the rest as `planned`."""
    each = _held(directory)
    described = _description(directory / "latest.safetensors")
    if described is None:
        found = planned(config)
    else:
        channels, height, width = described["shape"]
        shape, classes = (channels, height, width), len(described["classes"])
        found = AboutImages(shape, classes, (described["unlabeled"] or 0) / config.clients.total)
    if not each:
        return found
    return AboutImages(found.shape, found.classes, sum(each.values()) / len(each), each)


def _held(directory: Path) -> dict[int, int]:
    """A simulation writes down who holds what; over a network devices say it when they come."""
    rows = _json(directory / "holdings.json").get("clients", [])
    if rows:
        return {client: sum(counts) for client, counts in enumerate(rows)}
    devices = _json(directory / "fleet.json").get("clients", [])
    return {device["client"]: device["images"] for device in devices if "images" in device}


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _description(checkpoint: Path) -> dict[str, Any] | None:
    """What a checkpoint says of its model, without reading its weights; None: there is none."""
    try:
        with safe_open(checkpoint, framework="pt") as file:
            state = json.loads((file.metadata() or {}).get("state", "{}"))
    except (OSError, ValueError, SafetensorError):
        return None
    described = state.get("model", {}).get("description")
    return described if isinstance(described, dict) else None
