"""Start from trained weights: a run's own file, or one with torchvision's or timm's names.

Nothing in a file is executed: ``.safetensors`` holds tensors only, and ``.pth`` is read with ``weights_only``.
"""

import logging
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from semisfl.models.split import SplitModel
from semisfl.runs import checkpoint
from semisfl.settings.config import ConfigError

log = logging.getLogger(__name__)

WRAPPERS = ("state_dict", "model")
"""Keys under which training scripts put the weights of a model."""
# By model: a pattern for names in a file, and the name here. torchvision and timm agree on ResNet-18;
# neither has WRN-28-2, whose names are those of the usual PyTorch code (`block1.layer.0.conv1`).
Rules = tuple[tuple[str, Any], ...]
NAMES: dict[str, Rules] = {
    "resnet18": (
        (r"layer(\d)\.(\d)\.(conv\d|bn\d)", lambda m: f"{_block(m)}.body.{m[3]}"),
        (r"layer(\d)\.(\d)\.downsample\.0", lambda m: f"{_block(m)}.shortcut.conv"),
        (r"layer(\d)\.(\d)\.downsample\.1", lambda m: f"{_block(m)}.shortcut.bn"),
    ),
    "wrn-28-2": (
        (r"block(\d)\.layer\.0\.bn1", r"bn\1"),
        (r"block(\d)\.layer\.(\d)\.convShortcut", lambda m: f"{_block(m)}.shortcut.conv"),
        (r"block(\d)\.layer\.(\d)\.(conv\d|bn\d)", lambda m: f"{_block(m)}.body.{m[3]}"),
        (r"bn1", "bn4"),
    ),
}


def _block(match: re.Match[str]) -> str:
    return f"block{match[1]}_{int(match[2]) + 1}"


def start_from(model: SplitModel, file: str, name: str, classes: Sequence[str] = ()) -> None:
    """Copy the weights in ``file`` into ``model``, which is called ``name``; log what stays new.

    The head stays new where its size differs, or where a run's own file names other ``classes``. Raises
    ConfigError if no layer fits, or the file cannot be read.
    """
    where = f"model.weights = {file!r}"
    stored, theirs = _read(Path(file).expanduser(), where, NAMES.get(name, ()))
    own = _by_layer(model.whole().state_dict())
    head = next(reversed(_layers(key for key in own if own[key].dim() == 2)), "")
    if classes and theirs and tuple(theirs) != tuple(classes):
        log.warning("%s: the head %s is new, as the file has other classes", where, head)
        stored = {key: one for key, one in stored.items() if key.rpartition(".")[0] != head}
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
    new = _layers(key for key in own if key not in fits and not key.endswith("num_batches_tracked"))
    if new:
        sizes = "; ".join(_sizes(layer, stored, own) for layer in new)
        log.warning("%s: these layers do not fit and are new: %s", where, sizes)
    log.info("%s: %d of %d tensors were taken from it", where, len(fits), len(own))


def _read(file: Path, where: str, rules: Rules) -> tuple[dict[str, Tensor], Sequence[str]]:
    """Return the tensors in a file by the names they have here, and its classes if it names them."""
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                about = opened.metadata() or {}
            if "state" in about:  # written by this package
                stored = checkpoint.read(file)["model"]
                return _by_layer(stored["weights"]), stored["description"]["classes"]
            return _renamed(load_file(file), rules), ()
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
    return _renamed(tensors, rules), ()


def _by_layer(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of bottom and top by layer, so that the cut may differ."""
    return {key.partition(".")[2]: tensor for key, tensor in weights.items()}


def _renamed(stored: Mapping[str, Tensor], rules: Rules) -> dict[str, Tensor]:
    renamed = {}
    for key, tensor in stored.items():
        # Models trained on several GPUs have this prefix.
        layer, _, parameter = key.removeprefix("module.").rpartition(".")
        for pattern, name in rules:
            if re.fullmatch(pattern, layer):
                layer = re.sub(pattern, name, layer)
                break
        renamed[f"{layer}.{parameter}"] = tensor
    return renamed


def _layers(keys: Iterable[str]) -> list[str]:
    """Return the layers that parameters belong to, each once."""
    return list(dict.fromkeys(key.rpartition(".")[0] for key in keys))


def _sizes(layer: str, stored: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str:
    """Return a layer with the sizes of its weights in the file and in the model."""
    key = f"{layer}.weight"
    there = "x".join(map(str, stored[key].shape)) if key in stored else "not there"
    here = "x".join(map(str, own[key].shape)) if key in own else "another"
    return f"{layer} ({there} in the file, {here} here)"
