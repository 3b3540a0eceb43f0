"""The scene of an attack: a trained model, the clients' images, and the attacker's own images.

It is that of a run, or of a preset that is first trained for a few rounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from semisfl import seeds
from semisfl.data.augment import Augmentation, Normalizer
from semisfl.data.batches import draw_view, make_view
from semisfl.data.dataset import Dataset
from semisfl.models.layers import cut_layers
from semisfl.models.split import SplitModel
from semisfl.runs import checkpoint
from semisfl.runs.directory import RunDirectory
from semisfl.runs.experiment import Experiment, assemble
from semisfl.runs.loop import run_rounds
from semisfl.runs.portable import check_images
from semisfl.runs.run_data import load_data, load_images
from semisfl.settings.config import Config, ConfigError
from semisfl.settings.plain_values import words_of

VICTIMS, PUBLIC = 500, 2000
"""The most images that are attacked, and that the attacker has."""


@dataclass(frozen=True)
class Scene:
    """The setting of an attack: a trained model, clients' images, and the attacker's own images."""

    config: Config
    model: nn.Module
    """The whole model, from images to logits."""
    cut: int
    """The number of its layers that clients hold in this run."""
    normalizer: Normalizer
    public: Tensor
    """The attacker's own images: uint8 [n, C, H, W]."""
    public_labels: Tensor
    """Labels of the public images; -1 if unknown."""
    images: Tensor
    """The images of all clients, uint8 [n, C, H, W], and their true classes."""
    labels: Tensor
    shards: Sequence[np.ndarray]
    """The indices of each client's images."""
    classes: int
    accuracy: float
    """Accuracy of the model in percent, as the run is judged."""

    @property
    def device(self) -> torch.device:
        """Return the device on which the attacks compute."""
        return self.images.device

    def seed(self, *purpose: int | str) -> torch.Generator:
        """Return a CPU generator for a purpose."""
        return torch.Generator().manual_seed(seeds.derive(self.config.seed, "leakage", *purpose))

    def device_seed(self, *purpose: int | str) -> torch.Generator:
        """Return a generator on the images' device for a purpose."""
        drawn = seeds.derive(self.config.seed, "leakage", *purpose)
        return torch.Generator(self.device).manual_seed(drawn)

    def prepare(self, pixels: Tensor) -> Tensor:
        """Return pixels in 0..1 normalised for the model; the gradient is kept."""
        return self.normalizer.scale.view(-1, 1, 1) * 255 * pixels + self.normalizer.offset.view(
            -1, 1, 1
        )

    def weakly(self, images: Tensor, *purpose: int | str) -> Tensor:
        """Return a weak view of each of the uint8 ``images``, which is what a server receives features of."""
        augmentation, size = Augmentation.of(self.config.data.augment), (*images.shape[2:],)
        places, purpose = np.arange(len(images))[None], ("leakage", *purpose)
        drawn = draw_view(augmentation, "weak", places, size, self.config.seed, *purpose)
        return make_view(images, drawn)

    def victims(self) -> Tensor:
        """Return the places of the images that are attacked."""
        held = np.concatenate([np.asarray(shard) for shard in self.shards])
        rng = seeds.generator(self.config.seed, "leakage victims")
        return torch.from_numpy(rng.permutation(held)[:VICTIMS]).to(self.device)


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers of both halves, without the flatten and unflatten that a cut adds."""
    bottom, top = cut_layers(model)
    return [*bottom, *top]


def stage_ends(model: nn.Module) -> list[int]:
    """Return the cuts directly before each layer with weights, except the first such layer.

    A cut is the number of layers on the device. Cuts between these differ only by pooling or activation.
    """
    return [
        place
        for place, (_, layer) in enumerate(layers_of(model))
        if any(tensor.dim() > 1 for tensor in layer.state_dict().values())
    ][1:]


def scene_of_run(path: Path, device: str, public: str | None) -> Scene:
    """Return the scene of a finished or stopped simulation, from its last good checkpoint.

    With a frozen bottom all layers are those that the run began with: a later cut would freeze them too. ``public`` names the attacker's own images (a data set or a path); None: the run's test images. Raises
    ConfigError for a run over a network, whose images are not here, and for one without a checkpoint.
    """
    config = RunDirectory.open(path).config()
    if config.fleet.kind == "network":
        raise ConfigError(
            f"{path} was trained over a network, so its clients' images are not here; use a simulated run"
        )
    config = config.in_fleet("local")
    last = checkpoint.to_continue(path)
    if last is None:
        raise ConfigError(f"{path} has no checkpoint yet; train it first, or name a preset")
    state = last[1] if config.clients.bottom == "trained" else None
    try:
        data, partition = load_data(config)
        experiment = assemble(config, data, partition, device=device, resumed=state)
        before = last[1]["model"]["description"]
        check_images(before, experiment.description.as_dict(), may_grow=False)
    except ValueError as error:
        raise ConfigError(
            f"{path} cannot be attacked without the images and the model it had: {error}"
        ) from error
    if state is not None:
        experiment.load_state_dict(state)
    return _scene(experiment, data, partition.clients, public)


def scene_of_preset(config: Config, device: str, public: str | None, cuts: str) -> Scene:
    """Return the scene after ``config.rounds`` rounds, or before training if the bottom is frozen.

    ``public`` is as in `scene_of_run`. ``cuts`` are those of `cuts_of`, which are checked before the training.
    """
    data, partition = load_data(config)
    experiment = assemble(config, data, partition, device=device)
    cuts_of(_network(experiment), cuts)
    if config.clients.bottom == "trained":
        run_rounds(experiment)
    return _scene(experiment, data, partition.clients, public)


def _scene(experiment: Experiment, data: Dataset, shards: Any, public: str | None) -> Scene:
    """Return the scene of an assembled experiment; images of another set have no labels that mean the same."""
    config, device = experiment.config, experiment.hardware.device
    network = _network(experiment)
    images, labels = data.test_images, data.test_labels
    if public is not None:
        other = load_images(public, config)
        images, labels = other.images, torch.full((len(other.images),), -1)
    return Scene(
        config,
        network.float(),
        _cut_of(network),
        experiment.normalizer,
        images[:PUBLIC].to(device),
        labels[:PUBLIC].to(device),
        data.images.to(device),
        data.labels.to(device),
        shards,
        len(data.classes),
        next(iter(experiment.evaluate().values())).accuracy,
    )


def _network(experiment: Experiment) -> nn.Module:
    """Return the network that the run is judged by, with its two halves."""
    model = experiment.model
    return model.whole() if isinstance(model, SplitModel) else model


def _cut_of(network: nn.Module) -> int:
    """Return the number of layers that clients hold."""
    return len(cut_layers(network)[0])


def cuts_of(network: nn.Module, cuts: str) -> list[int]:
    """Return the run's own cut (``default``), every stage's end (``all``), or layers by name or number."""
    names = [name for name, _ in layers_of(network)]
    cuts = cuts.strip()
    if cuts == "default":
        return [_cut_of(network)]
    if cuts == "all":
        return sorted({*stage_ends(network), _cut_of(network)})
    chosen = []
    for word in words_of(cuts) or [cuts]:
        if word not in names and not (word.isdecimal() and 1 <= int(word) < len(names)):
            raise ConfigError(
                f"--cuts {word!r} is no layer of the model; its layers: {', '.join(names)}; or all"
            )
        chosen.append(int(word) if word.isdecimal() else names.index(word) + 1)
    return list(dict.fromkeys(chosen))
