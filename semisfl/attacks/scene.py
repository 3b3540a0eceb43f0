"""The setting of an attack: a trained model, clients' images, and the attacker's own."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from semisfl import seeds
from semisfl.data.augment import Normalizer
from semisfl.models.layers import cut_layers
from semisfl.settings.config import Config

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
    public_labels: Tensor
    """Labels of the public images; -1 if unknown."""
    images: Tensor
    labels: Tensor
    shards: Sequence[np.ndarray]
    classes: int
    accuracy: float

    @property
    def device(self) -> torch.device:
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
        scale, offset = (
            part.view(-1, 1, 1) for part in (self.normalizer.scale, self.normalizer.offset)
        )
        return pixels * 255 * scale + offset

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
    """Return the cuts directly before each layer with weights, except the first such layer."""
    heavy = [
        place
        for place, (_, layer) in enumerate(layers_of(model))
        if any(parameter.dim() > 1 for parameter in layer.parameters())
    ]
    return heavy[1:]
