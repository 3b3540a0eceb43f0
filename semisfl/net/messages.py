"""Define the protocol of server and client: every kind of frame and exactly what it may hold.

    client                          server
    hello                    ->
                             <-     welcome       the run, as JSON; nothing else is configured
    ready                    ->
                             <-     enrolled      which client of the run this is
                             <-     split         a split round begins (split_alone: no teacher is sent)
    features                 ->
                             <-     gradients     and so on, once per step
    bottom                   ->                   after the last step's gradients
                             <-     full          a full-model round begins; which states will come
                             <-     states
    fetch                    ->                   at most once per state
                             <-     states
    states                   ->                   and numbers; or:
    declined                 ->                   the client has nothing to add
                             <-     stored        a frozen bottom: which images' rows the server has
    missing                  ->                   how many images it lacks
                             <-     weights       of the bottom, if the client asked for them
                             <-     encode        so many images, the next ones that are missing
    rows                     ->                   of these images; and so on, until no image is missing
                             <-     published     the rows of all images are kept
    refusal                  ->                   instead of any answer: the device's policy forbids it

The server asks, the client answers; an answer carries the ticket of what it answers.
"""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from semisfl.data.fixed_views import DIGEST_BYTES
from semisfl.fleet.rows import RowFormat
from semisfl.models.split import SplitModel
from semisfl.net.frames import PROTOCOL, Schema, TensorSpec, WireError
from semisfl.settings import catalog, lookup
from semisfl.settings.config import Config
from semisfl.settings.policy import DevicePolicy

SMALL = 64 * 1024
"""Most bytes of a frame without tensors."""
MAX_STATES = 16
MOST_STORED = 8192 * DIGEST_BYTES
"""Most bytes of digests in a frame ``stored``."""

BY_POLICY = "the client's policy: "
"""How a server's reason begins if a device's own policy keeps it out."""
REVOKED = "is revoked"
"""How a server's reason ends if a device's certificate was revoked."""

SPLIT = {"round": int, "steps": int, "lr": float, "ema": bool, "decay": float}
HELLO = Schema(
    {
        "protocol": int,
        "run": str,
        "name": str,
        "codecs": list,
        "methods": list,
        "instance": str,
        "attempt": int,
        "policy": dict,
    }
)
WELCOME = Schema({"terms": str})
READY = Schema({"model": str, "images": int, "skipped": int})
ENROLLED = Schema({"client": int})
FULL = Schema(
    {
        "round": int,
        "steps": int,
        "lr": float,
        "work": str,
        "settings": dict,
        "states": dict,
        "on_request": dict,
    }
)
FETCH = Schema({"round": int, "name": str})
DECLINED = Schema({"round": int})
REFUSAL = Schema({"reason": str})
STORED = Schema({"images": bytes, "more": bool})
MISSING = Schema({"images": int, "bottom": bool})
ENCODE = Schema({"images": int})
PUBLISHED = Schema({"images": int})

Table = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def table(state: Mapping[str, Tensor]) -> Table:
    """Return shape and dtype of every tensor, by name."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}


def hello(
    methods: Collection[str],
    run: str = "",
    name: str = "",
    instance: str = "",
    attempt: int = 0,
    policy: DevicePolicy | None = None,
) -> dict[str, Any]:
    """Return the fields of a hello.

    ``methods``: the methods that this client may be asked for, and ``package.module:NAME`` of other code
    that its owner allows, which may be a codec. ``instance`` identifies the client's process, since several may share a certificate. ``attempt``
    counts its connections, so that the server can tell the newest from an abandoned one.
    """
    return {
        "protocol": PROTOCOL,
        "run": run,
        "name": name,
        "codecs": sorted([*catalog.CODECS, *(name for name in methods if ":" in name)]),
        "methods": sorted(methods),
        "instance": instance,
        "attempt": attempt,
        # Not the terms that the owner accepts: some may be those of other servers.
        "policy": (policy or DevicePolicy()).model_dump(mode="json", exclude={"model"}),
    }


@dataclass(frozen=True)
class Schemas:
    """Make the schemas of frames with tensors, for one model and configuration."""

    config: Config
    features: int
    bottom: Table
    full: Table

    @cached_property
    def digest(self) -> str:
        """Return a digest of all shapes: it is the same on both sides if they built the same model."""
        shapes = (self.features, sorted(self.bottom.items()), sorted(self.full.items()))
        return hashlib.sha256(repr(shapes).encode()).hexdigest()[:32]

    @classmethod
    def of(cls, config: Config, model: SplitModel) -> "Schemas":
        """Return the schemas of ``model``: its bottom in a split method, bottom and top in the others.

        The projection head is never sent.
        """
        works = lookup.method(config.method).works
        parts = {"bottom": model.bottom} | ({"top": model.top} if works else {})
        full = {
            f"{part}.{key}": value
            for part, module in parts.items()
            for key, value in module.state_dict().items()
        }
        return cls(config, model.features, table(model.bottom.state_dict()), table(full))

    def _state(self, name: str, keys: Table) -> dict[str, TensorSpec]:
        codec = self.config.wire.models
        return {
            f"{name}/{key}": TensorSpec(shape, dtype, codec) for key, (shape, dtype) in keys.items()
        }

    def _rows(self, codec: str) -> TensorSpec:
        return TensorSpec((self.config.clients.batch, self.features), torch.float32, codec)

    @cached_property
    def split(self) -> Schema:
        """Return the frame that begins a split round for a client that is sent the teacher."""
        bottom, teacher = (self._state(name, self.bottom) for name in ("bottom", "teacher"))
        return Schema(SPLIT, {**bottom, **teacher})

    @cached_property
    def split_alone(self) -> Schema:
        """Return the frame that begins a split round for a client that uses its own bottom as teacher."""
        return Schema(SPLIT, self._state("bottom", self.bottom))

    @cached_property
    def features_frame(self) -> Schema:
        """Return the frame of one step's features."""
        wire = self.config.wire
        student, teacher = self._rows(wire.student_features), self._rows(wire.teacher_features)
        return Schema({"round": int, "step": int}, {"student": student, "teacher": teacher})

    @cached_property
    def gradients(self) -> Schema:
        """Return the frame of one step's gradients, a row per image."""
        rows = self._rows(self.config.wire.gradients)
        return Schema({"round": int, "step": int}, {"gradients": rows})

    @cached_property
    def bottom_frame(self) -> Schema:
        """Return the frame of a trained bottom."""
        return Schema({"round": int}, self._state("bottom", self.bottom))

    @cached_property
    def weights(self) -> Schema:
        """Return the frame of a frozen bottom's weights."""
        return Schema({}, self._state("bottom", self.bottom))

    def rows(self, images: int) -> Schema:
        """Return the frame of the packed rows of ``images``, with their digests."""
        size = RowFormat.of(self.config, self.features).size
        return Schema({"images": bytes}, {"rows": TensorSpec((images, size), torch.uint8)})

    def states(self, outline: Mapping[str, Any]) -> Schema:
        """Return the frame of the states that ``outline`` (state -> names of its tensors) announces."""
        return Schema({"round": int}, self._tensors(outline))

    def result(self, outline: Mapping[str, Any]) -> Schema:
        """Return the frame of a client's result in a full-model round: states as in ``outline``, and numbers."""
        return Schema({"round": int, "numbers": dict}, self._tensors(outline))

    def _tensors(self, outline: Mapping[str, Any]) -> dict[str, TensorSpec]:
        tensors: dict[str, TensorSpec] = {}
        if len(outline) > MAX_STATES:
            raise WireError(f"{len(outline)} states are announced, at most {MAX_STATES} may be")
        for name, keys in outline.items():
            if not name.isidentifier() or type(keys) is not list:
                raise WireError(f"state {name[:40]!r} is not announced as a name and a list")
            for key in keys:
                if not isinstance(key, str) or key not in self.full:
                    raise WireError(
                        f"state {name[:40]!r} is to hold {str(key)[:40]!r}, which no model has"
                    )
            tensors |= self._state(name, {key: self.full[key] for key in keys})
        return tensors
