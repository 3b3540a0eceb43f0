"""Choose real images on which an exported model is compared with its original."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from semisfl.data import sources
from semisfl.runs.directory import RunDirectory
from semisfl.settings.counts import counted
from semisfl.use import pictures
from semisfl.use.classifier import Classifier

MOST = 256


def to_check(model: Classifier, places: Sequence[Path] | None) -> Tensor:
    """Return at most MOST uint8 images from ``places``, or else test images of the model's data set."""
    if not places:
        return _of_run(model)
    batches, reasons = [], []
    files = pictures.files_of(places)
    for batch in pictures.batches([files[place] for place in _spaced(len(files))], model.shape):
        batches.append(batch.images)
        reasons += batch.skipped
    images = torch.cat(batches)
    if not len(images):
        raise ValueError(
            f"none of {counted(len(reasons), 'image')} can be read: {reasons[0].image}: {reasons[0].reason}"
        )
    return images


def _of_run(model: Classifier) -> Tensor:
    assert model.path is not None
    try:
        config = RunDirectory.open(model.path.parent).config()
        if config.fleet.kind == "network":
            raise ValueError("a run over the network does not say where its server's images are")
        data = sources.load(config.data.name, size=config.data.size)
        if data.shape != model.shape or not len(data.test_images):
            raise ValueError(f"{data.name} has no test images of the model's size")
    except ValueError as error:
        raise ValueError(
            f"there are no images to check the exported model on ({error}); give some: --check IMAGES"
        ) from error
    return data.test_images[_spaced(len(data.test_images))]


def _spaced(count: int) -> list[int]:
    """Return at most MOST places of ``count`` images, evenly spaced: they may be sorted by class."""
    taken = min(MOST, count)
    return [number * count // taken for number in range(taken)]
