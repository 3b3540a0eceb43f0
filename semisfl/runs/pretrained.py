"""Start from trained weights: those of a package, a run's own file, or a file with torchvision's or timm's names.

Nothing in a file is executed: ``.safetensors`` holds tensors only, and ``.pth`` is read with ``weights_only``.
"""

import json
import logging
import math
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from semisfl.models.backbones import WEIGHT_NAMES, Rules
from semisfl.models.layers import keep_statistics
from semisfl.models.split import SplitModel
from semisfl.models.weight_files import file_of, packaged_file
from semisfl.runs import checkpoint
from semisfl.settings import catalog
from semisfl.settings.config import ConfigError

log = logging.getLogger(__name__)

WRAPPERS = ("state_dict", "model")
"""Keys under which training scripts put the weights of a model."""
IMAGENET_MODELS = frozenset(name for name, cut in catalog.MODELS.items() if cut is not None)
"""The backbones whose shared weights were trained on ImageNet's images."""


@dataclass(frozen=True)
class Pretrained:
    """Trained weights, read from what ``model.weights`` names, and how the images are normalised that they need."""

    where: str
    """The setting, for messages."""
    tensors: Mapping[str, Tensor]
    """By layer and parameter, with the names they have here."""
    mean: tuple[float, ...] | None = None
    """One number per channel, of pixels from 0 to 1; None: the file fits images as they are normalised anyway."""
    std: tuple[float, ...] | None = None
    classes: Sequence[str] = ()
    """The classes of the head, where the file names them."""

    @classmethod
    def read(cls, weights: str, name: str) -> "Pretrained":
        """Return the weights for the model called ``name``.

        ``weights``: a name in `catalog.WEIGHTS`, a file, a folder that holds model.safetensors, or ``hub:OWNER/NAME``,
        such a folder on the Hugging Face hub. Raises `ConfigError` if it is not there, or cannot be read without
        executing code.
        """
        where, rules = f"model.weights = {weights!r}", WEIGHT_NAMES.get(name, ())
        # Files of a known backbone with others' names are for images normalised as those of ImageNet.
        usual = (catalog.IMAGENET_MEAN, catalog.IMAGENET_STD) if name in IMAGENET_MODELS else None
        if entry := catalog.WEIGHTS.get(weights):
            tensors, _ = _read(packaged_file(entry, name), where, rules)
            return cls(where, tensors, entry.mean, entry.std)
        file = file_of(weights)
        tensors, described = _read(file, where, rules)
        classes = described.get("classes", ())
        mean, std = described.get("mean"), described.get("std")
        if mean is None and (beside := file.with_name("config.json")).is_file():
            pictures = json.loads(beside.read_text(encoding="utf-8")).get("pretrained_cfg", {})
            mean, std = pictures.get("mean"), pictures.get("std")
        if mean is None or std is None:
            mean, std = usual or (None, None)
        return cls(where, tensors, mean and tuple(mean), std and tuple(std), classes)

    def copy_into(self, model: SplitModel, name: str, classes: Sequence[str] = ()) -> list[str]:
        """Copy the weights into ``model``, which is called ``name``; return the layers that stay new, and log them.

        Layers are matched by name and shape; names of torchvision and timm are translated. So a network pretrained
        on other images gives all its layers but the head. The head also stays new where a run's own file names other
        ``classes``. Raises `ConfigError` if no layer fits.
        """
        stored, where = dict(self.tensors), self.where
        own = _by_layer(model.whole().state_dict())
        head = next(reversed(_layers(key for key in own if own[key].dim() == 2)), "")
        if classes and self.classes and tuple(self.classes) != tuple(classes):
            log.warning("%s: the head %s is new, as the file has other classes", where, head)
            stored = {key: one for key, one in stored.items() if key.rpartition(".")[0] != head}
        stored = {key: _fitted(one, own[key]) if key in own else one for key, one in stored.items()}
        fits = [key for key in own if key in stored and stored[key].shape == own[key].shape]
        if not any(own[key].is_floating_point() for key in fits):
            raise ConfigError(
                f"{where}: no layer fits model.name = {name!r}; the file has {', '.join(list(stored)[:3])}, the model "
                f"{', '.join(list(own)[:3])}"
            )
        with torch.no_grad():
            for key in fits:
                if not torch.isfinite(stored[key]).all():
                    raise ConfigError(f"{where}: {key} holds NaN or infinity; use another file")
                own[key].copy_(stored[key])
        new = _layers(
            key for key in own if key not in fits and not key.endswith("num_batches_tracked")
        )
        if new:
            sizes = "; ".join(_sizes(layer, stored, own) for layer in new)
            # A new head is what everybody expects.
            level = logging.INFO if new == [head] else logging.WARNING
            log.log(level, "%s: these layers do not fit and are new: %s", where, sizes)
        log.info("%s: %d of %d tensors were taken from it", where, len(fits), len(own))
        return new


def mark_pretrained(model: SplitModel, new: Sequence[str]) -> None:
    """Mark the parameters of all layers but the ``new`` ones: optimisers step them by ``optimizer.lr_pretrained``.

    Their BatchNorm keeps its statistics; a device's does, too, in every layer of the bottom.
    """
    keep_statistics(model.bottom)
    for name, module in model.whole().named_modules():
        pretrained = name.partition(".")[2].replace(".body.", ".") not in new
        if pretrained and not any(module.children()):
            keep_statistics(module)
        for parameter in module.parameters(recurse=False):
            parameter.pretrained = pretrained


def _read(file: Path, where: str, rules: Rules) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """Return the tensors in a file by the names they have here, and the description in a file of this package.

    ``where`` names the file in errors; ``rules`` translate the names of layers.
    """
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                about = opened.metadata() or {}
            if "state" in about:  # written by this package
                stored = checkpoint.read(file)["model"]
                return _by_layer(stored["weights"]), stored["description"]
            return _renamed(load_file(file), rules), json.loads(about.get("backbone", "{}"))
        values = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"{where} is no file of weights, or holds more than tensors, and reading it would execute code "
            "from it; save its state_dict() alone"
        ) from error
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError, EOFError) as error:
        raise ConfigError(
            f"{where} cannot be read as weights ({' '.join(str(error).split())[:200]}); give a .safetensors or .pth "
            "file of a state_dict()"
        ) from error
    for key in WRAPPERS:
        if isinstance(values, Mapping) and isinstance(values.get(key), Mapping):
            values = values[key]
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} holds no tensors by name; save a model's state_dict()")
    tensors = {str(key): value for key, value in values.items() if isinstance(value, Tensor)}
    return _renamed(tensors, rules), {}


def _by_layer(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of bottom and top by layer, so that the cut may differ, and without the part ``body``."""
    return {key.partition(".")[2].replace(".body.", "."): tensor for key, tensor in weights.items()}


def _renamed(stored: Mapping[str, Tensor], rules: Rules) -> dict[str, Tensor]:
    """Return the tensors of a file by their names here; a rule is for a whole name or for a layer's."""
    renamed = {}
    for key, tensor in stored.items():
        name = key.removeprefix("module.")  # models trained on several GPUs have this prefix
        layer, _, parameter = name.rpartition(".")
        for pattern, new in rules:
            whole, part = re.fullmatch(pattern, name), re.fullmatch(pattern, layer)
            if match := whole or part:
                name = match.expand(new) if isinstance(new, str) else new(match)
                name += "" if whole else f".{parameter}"
                break
        renamed[name.replace(".body.", ".")] = tensor
    return renamed


def _fitted(stored: Tensor, own: Tensor) -> Tensor:
    """Return a stored tensor in the shape of our own where both hold the same numbers, else as it is.

    Files write a 1 x 1 convolution as a matrix, and a learned vector with further dimensions of 1. A vision
    transformer's positions [1, 1 + height x width, columns] are resized to the run's pictures, which are square.
    """
    shape, wanted = ([n for n in one.shape if n > 1] for one in (stored, own))
    if shape == wanted:
        return stored.reshape(own.shape)
    if stored.dim() != 3 or own.dim() != 2 or stored.shape[2] != own.shape[1]:
        return stored
    first, grid = stored[:, :1], stored[:, 1:].unflatten(1, (math.isqrt(stored.shape[1] - 1), -1))
    side = math.isqrt(len(own) - 1)
    resized = F.interpolate(
        grid.permute(0, 3, 1, 2).float(), (side, side), mode="bicubic", antialias=True
    )
    return torch.cat([first, resized.flatten(2).transpose(1, 2)], 1).reshape(own.shape)


def _layers(keys: Iterable[str]) -> list[str]:
    """Return the layers that parameters belong to, each once."""
    return list(dict.fromkeys(key.rpartition(".")[0] for key in keys))


def _sizes(layer: str, stored: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str:
    """Return a layer with the sizes of its weights in the file and in the model."""
    key = f"{layer}.weight"
    there = "x".join(map(str, stored[key].shape)) if key in stored else "not there"
    here = "x".join(map(str, own[key].shape)) if key in own else "another"
    return f"{layer} ({there} in the file, {here} here)"
