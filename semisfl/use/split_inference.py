"""The protocol of split inference: a device runs the bottom, a server the top.

    device                       server
    describe           ->
                       <-        model         what it takes, its classes, which model this is
    fetch              ->                      each part once, by devices that were not given the bottom
                       <-        part
    features           ->                      any number of times
                       <-        answers

Each is one gRPC call over the mutual TLS of training, its frames those of `semisfl.net.frames`. A
request is split into messages of at most `chunks.CHUNK` bytes, so that its progress can be seen; those
of up to `chunks.LARGEST_MESSAGE` bytes are accepted too. An answer is one message. The call's metadata
has the number of rows and the codec, since a frame is decoded only against the schema that its receiver
expects.
"""

import json
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from semisfl.fleet.codec import codec_named
from semisfl.net import chunks
from semisfl.net.frames import Schema, TensorSpec
from semisfl.runs.portable import Description

SERVICE = "semisfl.Model"
MOST_ROWS = 256
"""Images of one call."""
LARGEST_CALL = 64 * 2**20
"""Bytes of one call: what a server may have to hold for each that is under way."""
ROWS, CODEC = "semisfl-rows", "semisfl-codec"
"""Keys of a call's metadata."""

DESCRIBE = Schema()
MODEL = Schema({"model": str, "images": bool})
FETCH = Schema({"part": int})
PART = 4 * 2**20
"""Bytes of the bottom in one answer, which a server holds until the device has taken it."""


def messages(frame: bytes) -> Iterator[bytes]:
    """Yield the messages of a request."""
    view = memoryview(frame)
    return (bytes(view[at : at + chunks.CHUNK]) for at in range(0, len(view), chunks.CHUNK))


def method(name: str) -> str:
    return f"/{SERVICE}/{name}"


def describe(description: Description, identity: str, features: int, bottom: str | None) -> str:
    """Return the model's description for a device, without what concerns only its training.

    ``bottom``: the digest of the bottom's weights, by which devices know their copy.
    """
    return json.dumps(
        {
            "classes": description.classes,
            "shape": description.shape,
            "mean": description.mean,
            "std": description.std,
            "layers": description.layers,
            "cut": description.cut,
            "identity": identity,
            "features": features,
            "bottom": bottom,
        }
    )


def features_schema(rows: int, features: int, codec: str) -> Schema:
    spec = TensorSpec((rows, features), torch.float32, codec)
    return Schema({"identity": str}, {"features": spec})


def images_schema(rows: int, shape: tuple[int, int, int]) -> Schema:
    return Schema({"identity": str}, {"images": TensorSpec((rows, *shape), torch.uint8)})


def answers_schema(rows: int, classes: int) -> Schema:
    return Schema({}, {"probabilities": TensorSpec((rows, classes))})


def joined_bytes(state: Mapping[str, Tensor]) -> Tensor:
    """Return the bytes of all tensors, by name."""
    return _together(
        [state[name].contiguous().reshape(-1).view(torch.uint8) for name in sorted(state)]
    )


def state_of(parts: Sequence[Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose joined bytes came in ``parts``; they have the shapes and types of ``like``."""
    names = sorted(like)
    pieces = _together(parts).split([like[name].nbytes for name in names])
    return {
        # A copy begins at an address that fits the type.
        name: piece.clone().view(like[name].dtype).reshape(like[name].shape)
        for name, piece in zip(names, pieces, strict=True)
    }


def _together(pieces: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(pieces)) if pieces else torch.empty(0, dtype=torch.uint8)


def parts_schemas(state: Mapping[str, Tensor]) -> list[Schema]:
    """Return the schemas of the parts in which tensors like these cross."""
    total = sum(tensor.nbytes for tensor in state.values())
    sizes = (min(PART, total - at) for at in range(0, total, PART))
    return [Schema({}, {"bytes": TensorSpec((size,), torch.uint8)}) for size in sizes]


def rows_at_a_time(features: int, codec: str) -> int:
    """Return how many images fit into one call."""
    one = codec_named(codec).size((1, features))
    return max(1, min(MOST_ROWS, (LARGEST_CALL - 2**20) // max(1, one)))
