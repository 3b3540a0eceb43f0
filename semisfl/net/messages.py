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
    accept                   ->
                             <-     states
    fetch                    ->                   any number of times
                             <-     states
    done                     ->                   numbers, and which states there are to upload
                             <-     upload
    states                   ->
    refusal                  ->                   instead of any answer: the device's policy forbids it

The server asks, the client answers; an answer carries the ticket of what it answers.
"""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from semisfl.models.split import Shape, SplitModel
from semisfl.net.frames import PROTOCOL, Schema, TensorSpec, WireError
from semisfl.net.ranges import check_terms
from semisfl.settings import lookup
from semisfl.settings.config import Config, parse
from semisfl.settings.policy import Policy

EXTENSIONS = ("teacher_once",)
"""Settings of ``wire`` that both sides have to know, named in a hello like the codecs."""
SMALL = 64 * 1024
"""Most bytes of a frame without tensors."""
MAX_STATES = 16
SERVERS_OWN: Mapping[str, Any] = {
    **dict.fromkeys(("stop", "robust", "sinks", "network"), True),
    "clients": {"total", "active"},
    "model": {"weights"},
    "runtime": {"best_by"},
}
"""Settings that no device needs. They may change at a restart without making it another run."""

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
    },
    max_bytes=SMALL,
)
WELCOME = Schema({"terms": str, "run": str, "epoch": int}, max_bytes=SMALL)
READY = Schema({"model": str, "images": int, "skipped": int}, max_bytes=SMALL)
ENROLLED = Schema({"client": int}, max_bytes=SMALL)
FULL = Schema(
    {
        "round": int,
        "steps": int,
        "lr": float,
        "work": str,
        "settings": dict,
        "states": dict,
        "on_request": dict,
    },
    max_bytes=4 * SMALL,
)
ACCEPT = Schema({"round": int}, max_bytes=SMALL)
FETCH = Schema({"round": int, "name": str}, max_bytes=SMALL)
DONE = Schema({"round": int, "numbers": dict, "states": dict}, max_bytes=4 * SMALL)
UPLOAD = Schema({"round": int}, max_bytes=SMALL)
REFUSAL = Schema({"reason": str}, max_bytes=SMALL)

Table = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def table(state: Mapping[str, Tensor]) -> Table:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}


@dataclass(frozen=True)
class Terms:
    """Hold everything that a client needs to take part; the server sends it."""

    config: Config
    shape: Shape
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def to_json(self) -> str:
        plain = {
            "config": self.config.model_dump(mode="json", exclude=dict(SERVERS_OWN)),
            "shape": list(self.shape),
            "classes": self.classes,
            "mean": list(self.mean),
            "std": list(self.std),
        }
        return json.dumps(plain, sort_keys=True)

    @classmethod
    def from_json(cls, text: str, methods: Collection[str]) -> "Terms":
        """Return the terms; raise `WireError` unless their method is one of this device's ``methods``.

        Other methods' settings are not even parsed: that would import the method's code, and no
        server may choose what a device imports.
        """
        try:
            plain = json.loads(text)
            if (method := plain["config"]["method"]) not in methods:
                raise ValueError(
                    f"method {str(method)[:80]!r} is neither installed here nor allowed by --allow-method"
                )
            channels, height, width = (int(side) for side in plain["shape"])
            terms = cls(
                parse(plain["config"]),
                (channels, height, width),
                int(plain["classes"]),
                tuple(float(value) for value in plain["mean"]),
                tuple(float(value) for value in plain["std"]),
            )
            check_terms(terms.config, terms.shape, terms.classes, terms.mean, terms.std)
            return terms
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise WireError(f"the server's terms cannot be read: {error}") from error

    @property
    def run(self) -> str:
        """Return an identifier of these terms."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:32]

    def codecs(self) -> set[str]:
        """Return the codecs and the `EXTENSIONS` that a client has to know."""
        wire, least = self.config.wire, self.config.policy.codec
        used = {name for name in EXTENSIONS if getattr(wire, name)}
        return wire.codecs | used | ({least} if least is not None else set())


def hello(
    methods: Collection[str],
    run: str = "",
    name: str = "",
    instance: str = "",
    attempt: int = 0,
    policy: Policy | None = None,
) -> dict[str, Any]:
    """Return the fields of a hello.

    ``instance`` identifies the client's process, since several may share a certificate. ``attempt``
    counts its connections, so that the server can tell the newest from an abandoned one.
    """
    return {
        "protocol": PROTOCOL,
        "run": run,
        "name": name,
        "codecs": sorted([*lookup.codec_names(), *EXTENSIONS]),
        "methods": sorted(methods),
        "instance": instance,
        "attempt": attempt,
        "policy": (policy or Policy()).model_dump(mode="json"),
    }


@dataclass(frozen=True)
class Schemas:
    """Make the schemas of frames with tensors, for one model and configuration."""

    config: Config
    features: int
    bottom: Table
    full: Table
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        shapes = (self.features, sorted(self.bottom.items()), sorted(self.full.items()))
        object.__setattr__(self, "digest", hashlib.sha256(repr(shapes).encode()).hexdigest()[:32])

    @classmethod
    def of(cls, config: Config, model: SplitModel) -> "Schemas":
        """Return the schemas of ``model``. A full model is bottom and top: the projection head never crosses."""
        parts = {"bottom": model.bottom, "top": model.top}
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

    def _rows(self, codec: str, count: int | None = None) -> TensorSpec:
        rows = self.config.clients.batch if count is None else count
        return TensorSpec((rows, self.features), torch.float32, codec)

    @cached_property
    def split(self) -> Schema:
        """Return the frame that begins a split round for a client that is sent the teacher."""
        bottom, teacher = (self._state(name, self.bottom) for name in ("bottom", "teacher"))
        return Schema(SPLIT, {**bottom, **teacher})

    @cached_property
    def split_alone(self) -> Schema:
        return Schema(SPLIT, self._state("bottom", self.bottom))

    @cached_property
    def features_frames(self) -> Sequence[Schema]:
        """Return the features frame for each number of teacher rows, from none to the whole batch.

        With ``wire.teacher_once``, only images that are new in the round have a teacher row.
        """
        wire, fields = self.config.wire, {"round": int, "step": int}
        student = self._rows(wire.student_features)
        return [
            Schema(
                fields, {"student": student, "teacher": self._rows(wire.teacher_features, count)}
            )
            for count in range(self.config.clients.batch + 1)
        ]

    @cached_property
    def gradients(self) -> Schema:
        rows = self._rows(self.config.wire.gradients)
        return Schema({"round": int, "step": int}, {"gradients": rows})

    @cached_property
    def bottom_frame(self) -> Schema:
        """Return the frame of a trained bottom."""
        return Schema({"round": int}, self._state("bottom", self.bottom))

    def states(self, outline: Mapping[str, Any]) -> Schema:
        """Return the frame of the states that ``outline`` (state -> names of its tensors) announces."""
        tensors: dict[str, TensorSpec] = {}
        if len(outline) > MAX_STATES:
            raise WireError(f"{len(outline)} states are announced, at most {MAX_STATES} may be")
        for name, keys in outline.items():
            if not name.isidentifier() or type(keys) is not list:
                raise WireError(f"state {name[:40]!r} is not announced as a name and a list")
            for key in keys:
                if key not in self.full:
                    raise WireError(
                        f"state {name[:40]!r} is to hold {str(key)[:40]!r}, which no model has"
                    )
            tensors |= self._state(name, {key: self.full[key] for key in keys})
        return Schema({"round": int}, tensors)
