"""Start from trained weights: a run's own file, or one with torchvision's or timm's names.

Nothing in a file is executed: ``.safetensors`` holds tensors only, and ``.pth`` is read with ``weights_only``.
"""

import logging
import os
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from semisfl.models.split import NARROW_HEAD, WIDEST_HEAD, SplitModel
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

    The head stays new where its size differs, or where a run's own file names other ``classes``. Raise
    ConfigError if no layer fits, or the file cannot be read.
    """
    where = f"model.weights = {file!r}"
    stored, theirs = _read(Path(os.path.expanduser(file)), where, NAMES.get(name, ()))
    own = _by_layer(model.whole().state_dict())
    head = next(reversed(_layers(key for key in own if own[key].dim() == 2)), "")
    others = bool(classes and theirs) and tuple(theirs) != tuple(classes)
    if others:
        stored = {key: one for key, one in stored.items() if key.rpartition(".")[0] != head}
    fits = [key for key in own if key in stored and stored[key].shape == own[key].shape]
    if not any(own[key].is_floating_point() for key in fits):
        some = ", ".join(list(stored)[:3])
        raise ConfigError(
            f"{where}: no layer fits model.name = {name!r}; the file has {some}, the model "
            f"{', '.join(list(own)[:3])}"
        )
    for key in fits:
        whole = own[key].is_floating_point() and not stored[key].is_floating_point()
        if whole or stored[key].layout != torch.strided:
            raise ConfigError(
                f"{where}: {key} holds {stored[key].dtype} in the layout {stored[key].layout}; use a file of dense "
                "floating-point weights, not quantised"
            )
    if bad := [key for key in fits if not torch.isfinite(stored[key]).all()]:
        raise ConfigError(f"{where}: {bad[0]} holds NaN or infinity; use another file")
    with torch.no_grad():
        for key in fits:
            own[key].copy_(stored[key])
    new = _layers(key for key in own if key not in fits and not key.endswith("num_batches_tracked"))
    if head in new:
        new.remove(head)
        why = f"{head} (other classes in the file)" if others else _sizes(head, stored, own)
        log.warning("%s: the head %s is new", where, why)
    if new:
        reasons = "; ".join(_sizes(layer, stored, own) for layer in new)
        log.warning("%s: these layers do not fit and are new: %s", where, reasons)
    log.info("%s: %d of %d tensors were taken from it", where, len(fits), len(own))


def widest_head_in(state: Mapping[str, Any]) -> int | None:
    """Return the paper's limit for the head's width if a checkpoint has a wider head than today's; else None."""
    for key, value in state.items():
        if key == "projector.0.weight" and len(value) > NARROW_HEAD:
            return WIDEST_HEAD
        if isinstance(value, Mapping) and (widest := widest_head_in(value)):
            return widest
    return None


def _read(file: Path, where: str, rules: Rules) -> tuple[dict[str, Tensor], Sequence[str]]:
    """Return the tensors in a file by the names they have here, and its classes if it names them."""
    if file.is_dir():
        written = (file / f"{name}.safetensors" for name in ("best", "latest"))
        wanted = next(filter(Path.is_file, written), "a .safetensors or .pth file")
        raise ConfigError(f"{where} is a folder; give {wanted}")
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                about = opened.metadata() or {}
            if "state" in about:  # written by this package
                stored = checkpoint.read(file)["model"]
                return _by_layer(stored["weights"]), stored["description"]["classes"]
            return _renamed(load_file(file), rules), ()
        values = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ConfigError(f"{where} does not exist; give a .safetensors or .pth file") from error
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"{where} is no file of weights, or holds more than tensors, and reading it would execute code "
            "from it; save its state_dict() alone"
        ) from error
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError, EOFError) as error:
        reason = " ".join(str(error).split())[:200] if not isinstance(error, KeyError) else ""
        raise ConfigError(
            f"{where} cannot be read as weights{f' ({reason})' if reason else ''}; give a .safetensors or .pth "
            "file of a state_dict()"
        ) from error
    for key in WRAPPERS:
        if isinstance(values, Mapping) and isinstance(values.get(key), Mapping):
            values = values[key]
    if not isinstance(values, Mapping) or not any(isinstance(v, Tensor) for v in values.values()):
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
