"""Return a model's parts as plain modules with normalisation inside, for export."""

from collections import OrderedDict
from typing import Literal

import torch
from torch import Tensor, nn

from semisfl.models.layers import Layers, Residual, named_layers
from semisfl.use.classifier import Classifier

Part = Literal["whole", "bottom", "top"]
INPUTS: dict[Part, str] = {"whole": "images", "bottom": "images", "top": "features"}
OUTPUTS: dict[Part, str] = {"whole": "probabilities", "bottom": "features", "top": "probabilities"}
NEEDS: dict[Part, tuple[str, ...]] = {
    "whole": ("bottom", "top"),
    "bottom": ("bottom",),
    "top": ("top",),
}


class Normalize(nn.Module):
    """Normalise uint8 images for the network."""

    scale: Tensor
    offset: Tensor

    def __init__(self, scale: Tensor, offset: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale.view(-1, 1, 1).clone())
        self.register_buffer("offset", offset.view(-1, 1, 1).clone())

    def forward(self, images: Tensor) -> Tensor:
        return images.float() * self.scale + self.offset


class Sum(nn.Module):
    """A residual block of plain layers."""

    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body, self.shortcut = body, shortcut

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x) + self.shortcut(x)
        return out


def plain(module: nn.Module) -> nn.Module:
    """Return ``module`` without this package's fused operations, which other programs lack."""
    if isinstance(module, Residual):
        return Sum(plain(module.body), plain(module.shortcut))
    if isinstance(module, Layers):
        layers = ((name, plain(layer)) for name, layer in named_layers(module))
        return nn.Sequential(OrderedDict(layers))
    return module


def module_of(model: Classifier, part: Part) -> nn.Module:
    """Return a module: images to probabilities, images to features, or features to probabilities."""
    model.need(*NEEDS[part])
    halves = {name: plain(getattr(model.network, name)) for name in NEEDS[part]}
    before = {"normalize": Normalize(model.normalizer.scale, model.normalizer.offset)}
    after = {"softmax": nn.Softmax(1)}
    steps = {
        **(before if INPUTS[part] == "images" else {}),
        **halves,
        **(after if OUTPUTS[part] == "probabilities" else {}),
    }
    return nn.Sequential(OrderedDict(steps)).eval().requires_grad_(False)


def input_of(model: Classifier, part: Part, images: Tensor) -> Tensor:
    """Return the input of ``part`` for uint8 ``images``."""
    return images if INPUTS[part] == "images" else model.features(images)


def example(model: Classifier, part: Part) -> Tensor:
    """Return an input of two rows: with one, an exporter would fix the batch size."""
    if INPUTS[part] == "features":
        return torch.zeros(2, model.network.features)
    return torch.zeros(2, *model.shape, dtype=torch.uint8)
