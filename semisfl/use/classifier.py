"""A trained model, loaded from a run or a file, and its answers: ``load("runs/first").predict(["photo.jpg"])``.

A file holds everything that is needed to use a model: weights, layers, cut, classes, the size of images and how
they are normalised (`semisfl.runs.portable.Description`). It holds the network that the run is judged by: the
teacher, if the method has one. `predict` and `evaluate` do the same for a module in memory, such as
``Result.model``.
"""

import os
import shlex
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from semisfl.data.augment import Normalizer
from semisfl.data.dataset import Dataset
from semisfl.engine.inference import outputs
from semisfl.models.build import build, check_same, with_top
from semisfl.models.layers import cut_layers
from semisfl.models.own import Own, feature_shape, global_seed, own_copy
from semisfl.models.shapes import Shape
from semisfl.models.split import SplitModel, split
from semisfl.runs import checkpoint
from semisfl.runs.checkpoint import CheckpointError
from semisfl.runs.portable import PARTS, Description
from semisfl.settings.layer_kinds import parse_layers
from semisfl.settings.run import CODE
from semisfl.use.pictures import CHUNK, ListedPictures, Pictures, Skipped, batches, list_pictures

SUFFIX = ".safetensors"
"""How the name of a model's file ends."""


@dataclass(frozen=True)
class Predictions:
    """A model's answers for the images that could be read."""

    names: list[str]
    """The files' names, or numbers for pixels."""
    probabilities: Tensor
    """Class probabilities [n, classes], in the order of ``names``."""
    classes: tuple[str, ...]
    skipped: list[Skipped]
    """Images that could not be read; ``names`` and ``probabilities`` lack them."""

    @property
    def labels(self) -> list[str]:
        """Return the most probable class of each image."""
        return [self.classes[place] for place in self.probabilities.argmax(1).tolist()]

    def top(self, count: int = 1) -> list[list[tuple[str, float]]]:
        """Return the ``count`` most probable classes of each image, with their probabilities."""
        values, places = self.probabilities.topk(min(count, len(self.classes)), dim=1)
        return [
            [(self.classes[place], value) for place, value in zip(*pair, strict=True)]
            for pair in zip(places.tolist(), values.tolist(), strict=True)
        ]


def predictions(
    images: ListedPictures,
    shape: Shape,
    classes: tuple[str, ...],
    answer: Callable[[Tensor], Tensor],
    size: int = CHUNK,
) -> Predictions:
    """Classify pictures in batches, however they are computed.

    Args:
        images: pictures as `list_pictures` returns them.
        shape: channels, height and width of the model's images.
        classes: names of the classes.
        answer: a function of uint8 images [n, C, H, W] that returns class probabilities [n, classes].
        size: most images of a batch.
    """
    names, skipped = [], []
    probabilities = [torch.empty(0, len(classes), dtype=torch.float32, device="cpu")]
    for batch in batches(images, shape, size):
        names += batch.names
        skipped += batch.skipped
        probabilities.append(answer(batch.images))
    return Predictions(names, torch.cat(probabilities), classes, skipped)


class Classifier:
    """A trained model in eval mode, cut into a bottom and a top, with its description.

    `load` makes it. A file may hold one half alone; what needs the other half raises `ValueError` then.
    """

    def __init__(
        self,
        description: Description,
        network: SplitModel,
        digest: str,
        path: Path | None = None,
        parts: Sequence[str] = PARTS,
    ) -> None:
        self.description = description
        self.network = network.eval().requires_grad_(False)
        self.digest = digest
        """The digest of classes and weights: the same in every file of the same model."""
        self.path = path
        self.parts = tuple(parts)
        """The parts whose weights the file holds."""
        self.rounds: int | None = None
        """Rounds that its run had done; None: its file does not say."""
        self.normalizer = Normalizer.of(description.mean, description.std)

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the names of the classes, in the order of the probabilities."""
        return self.description.classes

    @property
    def shape(self) -> Shape:
        """Return channels, height and width of an image."""
        return self.description.shape

    @property
    def device(self) -> torch.device:
        """Return the device on which the model computes."""
        return self.normalizer.scale.device

    @property
    def identity(self) -> str:
        """Return a name of the model and its cut: the same for a bottom and a top that belong together."""
        return f"{self.digest}/{len(cut_layers(self.network)[0])}"

    def to(self, device: str | torch.device) -> "Classifier":
        """Move the model to a device of torch, and return it."""
        for part in self.parts:  # the other one has no weights
            getattr(self.network, part).to(device)
        self.normalizer = self.normalizer.to(device)
        return self

    def predict(self, images: Pictures) -> Predictions:
        """Classify files, folders, Pillow images, or uint8 pixels [n, C, H, W] at the model's own size.

        Files that cannot be read are in ``skipped`` of the result, with the reason.
        """
        return predictions(list_pictures(images), self.shape, self.classes, self.probabilities)

    def probabilities(self, images: Tensor) -> Tensor:
        """Return the class probabilities [n, classes] of uint8 images [n, C, H, W], on the CPU."""
        self.need(*PARTS)
        return _run(self.network, images, self.normalizer, self.shape, len(self.classes)).softmax(1)

    def features(self, images: Tensor) -> Tensor:
        """Return the bottom's features [n, d] of uint8 images [n, C, H, W], on the CPU."""
        self.need("bottom")
        width = self.network.features
        return _run(self.network.bottom, images, self.normalizer, self.shape, width)

    def answer(self, features: Tensor) -> Tensor:
        """Return the class probabilities [n, classes] that the top computes from features [n, d], on the CPU."""
        self.need("top")
        with torch.no_grad():
            return self.network.top(features.to(self.device)).softmax(1).cpu()

    def need(self, *parts: str) -> None:
        """Raise `ValueError` if the file lacks the weights of one of the ``parts``."""
        if missing := [part for part in parts if part not in self.parts]:
            raise ValueError(
                f"{self.path} holds the {self.parts[0]} alone and this needs the {missing[0]}; "
                "give the run, or a file of the whole model"
            )

    def recut(self, cut: int | str) -> "Classifier":
        """Return the same model cut after another layer.

        ``cut``: the last layer of the bottom, by its name, or the number of layers in the bottom.
        """
        self.need(*PARTS)
        bottom, top = cut_layers(self.network)
        again = split(nn.Sequential(OrderedDict([*bottom, *top])), self.shape, cut, "none")
        description = replace(self.description, cut=cut)
        return Classifier(description, again, self.digest, self.path).to(self.device)


def _run(
    network: nn.Module, images: Tensor, normalizer: Normalizer, shape: Sequence[int], width: int
) -> Tensor:
    """Return the network's outputs [n, width] in float32 for uint8 images, on the CPU.

    Raises `ValueError` for images of another type, or with another ``shape`` [C, H, W].
    """
    if images.dtype != torch.uint8 or tuple(images.shape[1:]) != tuple(shape):
        raise ValueError(
            f"images are {images.dtype} {list(images.shape)}; the model takes torch.uint8 "
            f"[n, {', '.join(map(str, shape))}]"
        )
    device = normalizer.scale.device
    answers = outputs(network, images, lambda part: normalizer(part.to(device)))
    return torch.cat(
        [
            torch.empty(0, width, dtype=torch.float32, device="cpu"),
            *(answer.cpu() for answer in answers),
        ]
    )


def predict(model: nn.Module, images: Tensor | np.ndarray, data: Dataset) -> Tensor:
    """Return a module's class probabilities [n, classes], on the CPU.

    Args:
        model: a module that returns logits, such as ``Result.model``; it computes on its own device.
        images: uint8 pixels [n, C, H, W] of the size that the model was trained on.
        data: the data set of the training, whose mean and standard deviation normalise the images.
    """
    if isinstance(images, np.ndarray):
        images = torch.from_numpy(np.ascontiguousarray(images))
    normalizer = Normalizer.of(data.mean, data.std).to(next(model.parameters()).device)
    shape, width = data.images.shape[1:], len(data.classes)
    return _run(model, images, normalizer, shape, width).softmax(1)


def evaluate(model: nn.Module, data: Dataset) -> float:
    """Return a module's accuracy on the test images of ``data``, in percent; see `predict`."""
    chosen = predict(model, data.test_images, data).argmax(1)
    return 100 * int((chosen == data.test_labels.cpu()).sum()) / len(chosen)


# --- model files ---------------------------------------------------------------------------------


def load(
    path: str | os.PathLike[str],
    *,
    device: str = "cpu",
    model: Own | None = None,
    top: Own | None = None,
) -> Classifier:
    """Return a trained model.

    Args:
        path: a run's directory, which stands for its best model, or its latest if none was tested; or a
            ``.safetensors`` file of a model.
        device: a device of torch, such as ``cuda``.
        model: the network, if it was given to `train` as code that no layer table describes. It stays as it is.
        top: the layers after the cut, if only they were given as code.

    Raises `CheckpointError` for a file that is damaged or holds no model.
    """
    file = find(Path(path))
    state = checkpoint.read(file)
    about, weights, digest = _model_in(file, state)
    bottom = about.bottom_layers
    if top is not None and bottom is not None:
        model = with_top(parse_layers(bottom), top, about.shape, len(about.classes))
    if about.layers is None and model is None:
        what, argument = ("network", "model") if bottom is None else ("top", "top")
        raise ValueError(
            f"{file}: its {what} was given as code that no layer table describes; give it again, "
            f"load(path, {argument}=...)"
        )
    try:
        network = _from_table(about) if model is None else _from_code(about, model)
        parts = [part for part in PARTS if any(name.startswith(f"{part}.") for name in weights)]
        for part in parts:
            own = {k.removeprefix(f"{part}."): v for k, v in weights.items() if k.startswith(part)}
            getattr(network, part).load_state_dict(own, assign=True)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{file}: the weights do not fit the network it describes: {' '.join(str(error).split())}"
        ) from error
    # Computed in float32, whatever torch's default type is and the file holds.
    loaded = Classifier(about, network.float(), digest, file, parts)
    loaded.rounds = state.get("round")
    return loaded.to(device)


def _model_in(file: Path, state: dict[str, Any]) -> tuple[Description, dict[str, Tensor], str]:
    """Return the model's description, weights and digest from the ``state`` of a checkpoint's file."""
    try:
        model = state["model"]
        about, weights = Description.of(model["description"]), model["weights"]
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{file} does not describe its model: {error!r}") from error
    # A file of one half holds the digest of the whole model.
    content = {"classes": list(about.classes), "weights": weights}
    return about, weights, model.get("digest") or checkpoint.digest(content)


def _from_table(about: Description) -> SplitModel:
    """Return the network of a layer table, without weights: tensors on "meta" take no memory."""
    layers = parse_layers(about.layers)
    with torch.device("meta"):
        return build(layers, about.shape, len(about.classes), cut=about.cut, projector="none")


def _from_code(about: Description, model: Own) -> SplitModel:
    """Return the network of a user's module; raise `ValueError` if another one was trained."""
    stages = own_copy(model, about.shape)
    name = about.settings.get("model", {}).get("name", CODE)
    described = about.layers or about.bottom_layers
    table = None if described is None else parse_layers(described)
    if about.layers is None:
        check_same(stages, name, table, about.cut)
    with global_seed(0):
        feature_shape(stages, about.shape)  # lazy layers make their weights here, and become others
    if about.layers is not None:
        check_same(stages, name, table, about.cut)
    return split(stages, about.shape, about.cut, "none")


def find(path: Path) -> Path:
    """Return the model's file: ``path`` itself, or a run's best, or its latest.

    Raises `CheckpointError` for a run that has none yet, and `ValueError` for a path that is no run.
    """
    for file in (path, path / f"best{SUFFIX}", path / f"latest{SUFFIX}"):
        if file.is_file():
            return file
    if (path / "config.toml").is_file():
        raise CheckpointError(
            f"{path} has no checkpoint; if the run did not diverge, go on with: "
            f"semisfl run --resume {shlex.quote(str(path))}"
        )
    raise ValueError(
        f"{path} is neither a run's directory nor a {SUFFIX} file of a model; name one of them"
    )
