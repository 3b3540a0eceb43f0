"""Small trained runs that the tests of this folder share, and images as files."""

from collections.abc import Callable
from pathlib import Path

from PIL import Image

from semisfl.data.dataset import Dataset
from semisfl.runs import checkpoint, experiment
from semisfl.runs.loop import Result
from semisfl.runs.start import train
from semisfl.use.classifier import Classifier, load
from tests import toy

Trained = Callable[[str], tuple[Path, Result]]
"""A method's name -> a finished run of it: its directory and its result."""


def train_toy(method: str, place: Path) -> Result:
    data = toy.dataset()
    return train(
        toy.values(method, "rounds=2"),
        out=place,
        data=data,
        partition=toy.partition(data),
        model=toy.network(batchnorm=True, dropout=True),
        device="cpu",
    )


def write_images(data: Dataset, place: Path, count: int = 24) -> Path:
    """Write the first test images as ``place/<class>/<number>.png``."""
    for number in range(count):
        name = data.classes[int(data.test_labels[number])]
        (place / name).mkdir(parents=True, exist_ok=True)
        pixels = data.test_images[number].numpy().transpose(1, 2, 0)
        Image.fromarray(pixels).save(place / name / f"{number:03}.png")
    return place


def untrained_model(place: Path, layers: str, cut: int) -> Classifier:
    """Return the model of a layer table as its file gives it."""
    data = toy.dataset()
    settings = toy.values("supervised", f"model.layers={layers}", f"model.cut={cut}")
    built = experiment.assemble(settings, data, toy.partition(data), device="cpu")
    checkpoint.write(place / "untrained.safetensors", {"model": built.model_state(None)})
    return load(place / "untrained.safetensors")
