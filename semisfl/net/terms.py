"""The terms of a run: everything that decides what a device computes and sends, and their digest.

A server sends them when a device connects. The owner of the device accepts them by their digest. The
device builds its part from them alone: what they do not hold has its default on the device, so the
digest covers exactly what the device obeys. Only weights, gradients and the numbers that
`semisfl.net.client.agreement` bounds come later.
"""

import hashlib
import json
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from semisfl.fleet.codec import roundtrip_state
from semisfl.models.freezing import weights_digest
from semisfl.models.shapes import Placed, Shape, place
from semisfl.models.split import SplitModel
from semisfl.models.zoo import layers_by_cut
from semisfl.net.frames import WireError
from semisfl.net.ranges import check_images, check_settings
from semisfl.settings import lookup
from semisfl.settings.config import Config, parse
from semisfl.settings.policy import DIGEST

_ALWAYS: dict[str, Any] = {
    **dict.fromkeys(("seed", "wire"), True),
    "data": {"augment": True},
    "runtime": {"precision": True, "deterministic": True},
}
AGREED: dict[str, dict[str, Any]] = {
    "trained": _ALWAYS
    | dict.fromkeys(("method", "rounds", "optimizer"), True)
    | {
        "clients": dict.fromkeys(("batch", "steps", "epochs"), True),
        "teacher": {"ema_decay": True},
    },
    "frozen": _ALWAYS | {"clients": {"bottom": True, "weak_views": True, "strong_views": True}},
}
"""Settings that decide what a device computes and sends, by ``clients.bottom``: with a frozen bottom nothing depends
on the method. The model, the policy and the method's own settings are added by `Terms.config_values`; all others are
the server's own."""
ON_CLIENTS = {"client_teacher"}
"""Settings of a split method that clients obey; clients of the other methods obey the whole section."""


@dataclass(frozen=True)
class Terms:
    """Everything that a client needs to take part, as the server sends it."""

    config: Config
    shape: Shape
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    bottom: str | None = None
    """The digest of a frozen bottom's weights (`bottom_digest`); None: the bottom is trained."""

    def to_json(self) -> str:
        """Return the terms in their one canonical form, which is sent and which the digest covers."""
        plain = {
            "config": self.config_values(),
            "shape": list(self.shape),
            "classes": self.classes,
            "mean": list(self.mean),
            "std": list(self.std),
            "bottom": self.bottom,
        }
        return json.dumps(plain, sort_keys=True)

    def config_values(self) -> dict[str, Any]:
        """Return the settings that reach a device."""
        config = self.config
        frozen = config.clients.bottom == "frozen"
        values = config.model_dump(mode="json", include=AGREED[config.clients.bottom])
        # A policy without demands says nothing, whichever lines this version knows.
        values["policy"] = config.policy.model_dump(mode="json", exclude_defaults=True)
        method = lookup.method(config.method)
        layers, cut = layers_by_cut(config.model, whole=bool(method.works))
        values["model"] = {
            "layers": [layer.model_dump(mode="json") | {"name": name} for name, layer in layers],
            "cut": cut,
        }
        if method.section and not frozen and (own := getattr(config, method.section, None)):
            which = None if method.works else ON_CLIENTS
            values[method.section] = own.model_dump(mode="json", include=which)
        return values

    @classmethod
    def from_json(cls, text: str, methods: Collection[str]) -> "Terms":
        """Return the terms; raise `WireError` unless their method is one of this device's ``methods``.

        Other methods' settings are not even parsed: that would import the method's code, and no
        server may choose what a device imports.
        """
        try:
            plain = json.loads(text)
            # Terms of a frozen bottom name no method.
            if (method := plain["config"].get("method")) not in {None, *methods}:
                raise ValueError(
                    f"method {str(method)[:80]!r} is neither installed here nor allowed by --allow-method"
                )
            lookup.check_importable(plain["config"], "the server's terms", methods)
            channels, height, width = (int(side) for side in plain["shape"])
            terms = cls(
                # A server may not name a file of this device.
                parse(plain["config"] | {"model": plain["config"]["model"] | {"weights": None}}),
                (channels, height, width),
                int(plain["classes"]),
                tuple(float(value) for value in plain["mean"]),
                tuple(float(value) for value in plain["std"]),
                plain["bottom"],
            )
            check_images(terms.shape, terms.classes, terms.mean, terms.std)
            check_settings(terms.config)
            terms.check_bottom()
            # Drop whatever else the server sent: the digest does not cover it.
            return replace(terms, config=parse(terms.config_values()))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise WireError(f"the server's terms cannot be read: {error}") from error

    def check_bottom(self) -> None:
        """Raise ValueError unless a frozen bottom has a digest, and a bottom that is trained has none."""
        frozen = self.config.clients.bottom == "frozen"
        if not (re.fullmatch(DIGEST, str(self.bottom)) if frozen else self.bottom is None):
            raise ValueError(f"bottom = {self.bottom!r:.80} does not fit clients.bottom")

    def placed(self) -> tuple[list[Placed], int]:
        """Return the layers that a device builds with their shapes, and how many are its own in a split method.

        Raises `WireError` if they cannot be built.
        """
        whole = bool(lookup.method(self.config.method).works)
        layers, held = layers_by_cut(self.config.model, whole=whole)
        try:
            placed = place([layer for _, layer in layers], self.shape, self.classes, whole=whole)
        except ValueError as error:
            raise WireError(f"the model of these terms cannot be built: {error}") from error
        if not isinstance(held, int) or not 1 <= held < len(placed) + (not whole):
            raise WireError(f"the model of these terms cannot be cut at {held!r:.60}")
        for side, part in (("device", placed[:held]), ("server", placed[held:])):
            if (part or whole) and not any(layer.parameters for layer in part):
                raise WireError(f"the model of these terms leaves the {side} no parameters")
        return placed, held

    @property
    def digest(self) -> str:
        """Return what an owner accepts: ``sha256:`` and 64 hexadecimal digits."""
        return f"sha256:{hashlib.sha256(self.to_json().encode()).hexdigest()}"

    @property
    def run(self) -> str:
        """Return a short identifier of these terms."""
        return self.digest.removeprefix("sha256:")[:32]

    def codecs(self) -> set[str]:
        """Return the codecs that a client has to know."""
        wire, least = self.config.wire, self.config.policy.codec
        return wire.codecs | ({least} if least is not None else set())


def bottom_digest(config: Config, model: SplitModel) -> str | None:
    """Return the digest of a frozen bottom as devices get it, encoded by ``wire.models``; None: it is trained."""
    if config.clients.bottom == "trained":
        return None
    return weights_digest(roundtrip_state(model.bottom.state_dict(), config.wire.models))
