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
from collections.abc import Iterator, Mapping

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
"""Bytes of the bottom's frame in one answer, which a server holds until the device has taken it."""


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


def bottom_schema(state: Mapping[str, Tensor]) -> Schema:
    specs = {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in state.items()}
    return Schema({}, specs)


def parts_schemas(size: int) -> list[Schema]:
    """Return the schemas of the parts in which a frame of ``size`` bytes crosses."""
    sizes = (min(PART, size - at) for at in range(0, size, PART))
    return [Schema({}, {"bytes": TensorSpec((one,), torch.uint8)}) for one in sizes]


def rows_at_a_time(features: int, codec: str) -> int:
    """Return how many images fit into one call."""
    one = codec_named(codec).size((1, features))
    return max(1, min(MOST_ROWS, (LARGEST_CALL - 2**20) // max(1, one)))
