"""Read and write checkpoints: nested tensors and plain values in one safetensors file.

Tensors are entries of the file; the nesting, the plain values and a hash of everything are in its metadata. Nothing in
a checkpoint is executed when it is read. A training's checkpoint has ``round``, ``method``, ``fleet``, ``traffic`` and
``model``; a model's has ``round`` and ``model`` alone.
"""

import hashlib
import json
import logging
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from semisfl.engine.weights import Unchanging
from semisfl.files import write_whole
from semisfl.fleet.packing import Place, flatten, place_of, unflatten

log = logging.getLogger(__name__)

FORMAT = 1
KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names of the types in safetensors."""


class CheckpointError(ValueError):
    """Raised with one line that says why a checkpoint cannot be used."""


def digest(state: Any) -> str:
    """Return a hash of a nested state, as 32 hexadecimal digits: of names, types, shapes, bytes and plain values.

    Equal states have equal hashes on every machine and device.
    """
    tensors: dict[str, Tensor] = {}
    plain = flatten(state, "", tensors)
    summary = hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        summary.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        summary.update(_bytes_of(tensor))
    return summary.hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def snapshot(state: Any, copies: dict[Place, Tensor] | None = None, name: str = "") -> Any:
    """Return a copy of a nested state that later steps cannot change; a tensor that occurs twice is copied once.

    Tensors stay on their device. Raises ValueError for what a checkpoint could not give back as it was: keys that are
    no text, and values other than tensors, numbers, text, lists and dictionaries. ``name`` is the place of ``state``,
    for that error, and ``copies`` are the tensors so far.
    """
    copies = {} if copies is None else copies
    if isinstance(state, Tensor):
        place = place_of(state)
        if place not in copies:
            copies[place] = state.detach().clone()
        return copies[place]
    if isinstance(state, Unchanging):
        return state
    if isinstance(state, dict):
        if others := [key for key in state if not isinstance(key, str)]:
            raise ValueError(f"the state {name} has the key {others[0]!r}; make every key a text")
        return {key: snapshot(value, copies, f"{name}/{key}") for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [snapshot(value, copies, f"{name}/{place}") for place, value in enumerate(state)]
    if state is not None and not isinstance(state, int | float | str):
        raise ValueError(
            f"the state {name} is of type {type(state).__name__}, which a checkpoint cannot hold; use tensors, numbers, "
            "text, lists and dictionaries"
        )
    return state


def write(path: Path, state: dict[str, Any], *, private: bool = False) -> None:
    """Replace ``path`` atomically: a crash or a full disk leaves the previous file unchanged.

    ``private``: other users cannot read it.
    """
    tensors: dict[str, Tensor] = {}
    plain = flatten(state, "", tensors, once={})
    metadata = {
        "format": str(FORMAT),
        "state": json.dumps(plain, sort_keys=True),
        "digest": digest(state),
    }
    write_whole(path, lambda file: _stream(file, tensors, metadata), private=private)


def _stream(file: BinaryIO, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write tensor by tensor: FedMatch has gigabytes, which do not fit into memory twice."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        shape, kind = list(tensor.shape), KINDS[tensor.dtype]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    about = json.dumps(header, separators=(",", ":")).encode()
    about += b" " * (-len(about) % 8)  # numbers of eight bytes come first, and lie aligned
    file.write(struct.pack("<Q", len(about)) + about)
    for _, tensor in ordered:
        file.write(_bytes_of(tensor))


def read(path: Path) -> dict[str, Any]:
    """Return the state in ``path``, with its tensors on the CPU.

    Raises `CheckpointError` if the file is missing or damaged, or does not match its hash.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Copies: the originals map the file, and a replaced file would keep its space on a full disk.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        if metadata.get("format") != str(FORMAT):
            raise CheckpointError(f"{path} is no checkpoint of this version of semisfl")
        state = unflatten(json.loads(metadata["state"]), tensors)
        intact = digest(state) == metadata["digest"]
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint {path}") from error
    except CheckpointError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path, error) from error
    if not intact:
        raise _damaged(path, "it does not match its hash")
    return dict(state)


def _damaged(path: Path, reason: object) -> CheckpointError:
    line = " ".join(str(reason).split())
    return CheckpointError(
        f"checkpoint {path} is damaged ({line}); use another one, e.g. previous.safetensors"
    )


def to_continue(path: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the checkpoint to continue a run from, with its file; None if there is none yet.

    ``path`` is a checkpoint, or a run's directory, whose latest checkpoint is read, or the previous one if the latest
    cannot be used. Raises `CheckpointError` if none can be used.
    """
    latest, previous = path / "latest.safetensors", path / "previous.safetensors"
    if path.suffix == ".safetensors":
        return path, _training_state(path)
    if not latest.exists() and not previous.exists():
        return None
    try:
        return latest, _training_state(latest)
    except CheckpointError as error:
        if not previous.exists():
            raise
        state = _training_state(previous)
        log.warning("%s", error)
        return previous, state


def _training_state(file: Path) -> dict[str, Any]:
    """Return the finite state of a training in a checkpoint; raise `CheckpointError` if it has none."""
    state = read(file)
    if "method" not in state:
        raise CheckpointError(
            f"{file} holds a model, not the state of its training; continue from {file.parent}, or start a new "
            f"run from it with model.weights={file}"
        )
    if not finite(state["method"]):
        raise CheckpointError(f"checkpoint {file} holds NaN or Inf; use an older one")
    return state


def finite(state: Any) -> bool:
    """Return whether a nested state holds neither NaN nor Inf, in its tensors and in its numbers.

    Tensors of whole numbers always are finite.
    """
    if isinstance(state, Tensor):
        return not state.is_floating_point() or bool(torch.isfinite(state).all())
    if isinstance(state, Mapping):
        return all(finite(value) for value in state.values())
    if isinstance(state, list | tuple):
        return all(finite(value) for value in state)
    return not isinstance(state, float) or math.isfinite(state)
