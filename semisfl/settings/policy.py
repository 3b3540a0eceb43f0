"""The policy of a device: what may leave it, whatever its server asks. Loads no torch.

A device's operator writes it (`semisfl join --policy policy.toml`). A run asks the same of every client
in its section ``[policy]``, which has the lines that a simulation can obey. Over a network both apply,
the stricter one in each line: a server can ask its devices for more protection, never for less.
"""

from collections.abc import Callable, Mapping
from math import inf, log, log1p
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from semisfl.settings import catalog, lookup
from semisfl.settings.plain_values import read
from semisfl.settings.sections import ConfigError, Section, one_line

DIGEST = r"^sha256:[0-9a-f]{64}$"
Digest = Annotated[str, Field(pattern=DIGEST)]


def _as_list(value: Any) -> Any:
    """Return a single digest as a list."""
    return [value] if isinstance(value, str) else value


class PolicyBreach(ValueError):
    """The policy forbids something that would leave this device. The message says what, and the limit."""

    kind = "policy"
    """The kind of a `semisfl.net.client.rejection.Rejected`, which chooses a command's exit code."""

    def __init__(self, message: str, to_server: str | None = None) -> None:
        """Take ``to_server``: the message for the server, where ``message`` holds more than it may know."""
        super().__init__(message)
        self.to_server = to_server or message


class Policy(Section):
    """Hold what a run asks of every client."""

    codec: str | None = Field(
        None, description="features are sent in this codec or one with fewer bytes; none: any"
    )
    clip: float | None = Field(
        None, gt=0, description="largest norm of an image's features; none: no limit"
    )
    noise: float = Field(
        0.0,
        ge=0,
        description="deviation of the Gaussian noise on each value of features, in units of clip",
    )
    update_clip: float | None = Field(
        None, gt=0, description="largest norm of a bottom's change in a round; none: no limit"
    )
    update_noise: float = Field(
        0.0,
        ge=0,
        description="the same for each weight of the bottom sent, in units of update_clip",
    )
    bits_per_image: float | None = Field(
        None,
        gt=0,
        description="most bits about any one image that all that is sent may carry; none: no limit",
    )
    uses_per_image: int | None = Field(
        None, ge=1, description="how often the features of one image may be sent; none: no limit"
    )

    @model_validator(mode="after")
    def _consistent(self) -> "Policy":
        """Refuse lines that would do nothing without another line."""
        if self.update_noise and self.update_clip is None:
            raise ValueError(
                f"policy.update_noise = {self.update_noise:g} is in units of policy.update_clip; set it too"
            )
        if self.noise and self.clip is None:
            raise ValueError(
                f"policy.noise = {self.noise:g} is in units of policy.clip; set it too, about the median "
                "norm of features that `semisfl leakage` prints"
            )
        if self.bits_per_image is not None and not self.noise:
            raise ValueError(
                f"policy.bits_per_image = {self.bits_per_image:g} needs noise on all that is sent; "
                "set policy.clip and policy.noise (docs/security.md has values)"
            )
        return self

    def about_uploads(self, bottom: str) -> list[str]:
        """Return a line if there is no noise on the ``bottom`` that is sent back; a ``frozen`` one is not."""
        if bottom == "frozen" or self.clip is None or self.update_noise:
            return []
        return [
            "policy.clip and policy.noise do not protect images that a trained bottom still shows when it is sent back; "
            "set policy.update_clip and policy.update_noise too (docs/security.md has values), or clients.bottom = 'frozen'"
        ]

    @property
    def for_features(self) -> list[str]:
        """Return the lines that are set and protect what split methods send; they do nothing for whole models."""
        default = Policy()
        return [name for name, value in default if getattr(self, name) != value]

    def summary(self) -> str:
        """Return the lines that differ from the defaults, in one line of text."""
        default = type(self)()
        demands = [f"{name} = {value}" for name, value in self if value != getattr(default, name)]
        return ", ".join(demands) or "no demands"


AnyPolicy = TypeVar("AnyPolicy", bound=Policy)


class DevicePolicy(Policy):
    """Hold what the owner of a device asks. Its own lines are not a server's to say."""

    model: Annotated[tuple[Digest, ...], BeforeValidator(_as_list)] = Field(
        (), description="digests of the terms that the device accepts"
    )
    full_models: bool | None = Field(
        None,
        description="take part in methods that send whole models; none: a device does not, a simulation does",
    )
    trained_bottom: bool = Field(
        True,
        description="take part in runs that train the bottom, which is sent back and shows images; false: only with a frozen one",
    )
    rounds: int | None = Field(
        None, ge=1, description="how many rounds the device takes part in; none: no limit"
    )
    smallest_batch: int = Field(
        4,
        ge=1,
        description="least images per step, for a server that only looks: the gradient of a few shows each of them",
    )

    @property
    def capped(self) -> bool:
        """Return whether the policy has a quota, so that what is used of it must be written down."""
        return any(
            limit is not None for limit in (self.bits_per_image, self.uses_per_image, self.rounds)
        )

    def of_device(self) -> "DevicePolicy":
        """Return the policy as a device holds it: whole models stay there unless the owner says true."""
        return self.model_copy(update={"full_models": bool(self.full_models)})


def read_policy(path: Path) -> DevicePolicy:
    """Return the policy in a device's file; its keys are alone or under ``[policy]``.

    Raises `ConfigError` for a mistake and for a file without any line.
    """
    values = read(path)
    if isinstance(inner := values.get("policy"), dict) and len(values) == 1:
        values = inner
    if not values:  # an empty or cut-off file must not count as consent to everything
        raise ConfigError(
            f"{path} holds no line of a policy; policies/open.toml is one without limits"
        )
    return parse_policy(values, str(path))


def parse_policy(values: Mapping[str, Any], where: str = "policy") -> DevicePolicy:
    """Return the policy of a device from plain values; ``where`` they come from stands before a mistake.

    Raises `ConfigError` with one line.
    """
    try:
        return with_known_codec(DevicePolicy.model_validate(values))
    except ValidationError as error:
        line = one_line(error, DevicePolicy, list(DevicePolicy.model_fields))
        raise ConfigError(f"{where}: {line}") from None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def with_known_codec(policy: AnyPolicy) -> AnyPolicy:
    """Return the policy if its codec is known here; else raise `ConfigError`."""
    if policy.codec is not None:
        lookup.check_name(policy.codec, catalog.CODECS, "policy.codec")
    return policy


def _least(one: float | None, other: float | None) -> Any:
    return min((value for value in (one, other) if value is not None), default=None)


_STRICTER: dict[str, Callable[[Any, Any], Any]] = {
    "codec": lambda own, asked: asked if own is None else own,
    **dict.fromkeys(("clip", "update_clip", "bits_per_image", "uses_per_image"), _least),
    **dict.fromkeys(("noise", "update_noise"), max),
}


def stricter(own: DevicePolicy, run_policy: Policy) -> DevicePolicy:
    """Return the stricter of both in every line; a device's own lines stay as they are.

    ``codec`` is the device's ``own`` if it has any: the settings of a run are checked against both
    policies.
    """
    chosen = {
        name: choose(getattr(own, name), getattr(run_policy, name))
        for name, choose in _STRICTER.items()
    }
    # Noise is in units of the clip: where the other side's clip is smaller, the amount must not shrink.
    for clip, noise in (("clip", "noise"), ("update_clip", "update_noise")):
        amounts = [
            getattr(side, noise) * getattr(side, clip)
            for side in (own, run_policy)
            if getattr(side, clip) is not None
        ]
        if amounts and chosen[clip]:
            chosen[noise] = max(chosen[noise], max(amounts) / chosen[clip])
    return own.model_copy(update=chosen)


# --- the bound in bits ------------------------------------------------------------------------------
# A row of d values, clipped to norm 1, with independent Gaussian noise of deviation s on each value is a
# Gaussian channel. It carries at most d/2 log2(1 + 1/(d s^2)) bits (Shannon 1949), whatever computed the
# row. What a server learned before does not raise this (Shannon 1956), so the bits of all rows add up. The
# sum bounds the mutual information between all images of a device together and all that it sent.


def row_bits(values: int, noise: float) -> float:
    """Return the most bits that a row of ``values`` numbers carries.

    ``noise``: the deviation of the noise on each number, in units of the row's largest norm; 0: no bound (inf).
    """
    if values == 0:
        return 0.0
    # A product may become inf where a power would raise an error, or 0.
    power = values * noise * noise
    return values / 2 * log1p(1 / power) / log(2) if power > 0 else inf


def feature_bits(policy: Policy, features: int) -> float:
    """Return the most bits that one row of ``features`` numbers carries under a policy's clip and noise."""
    return row_bits(features, policy.noise if policy.clip is not None else 0.0)


def upload_bits(policy: Policy, weights: int) -> float:
    """Return the most bits that an uploaded bottom of ``weights`` numbers carries: all of them are one row."""
    return row_bits(weights, policy.update_noise if policy.update_clip is not None else 0.0)


def round_bits(policy: Policy, uses: int, features: int, weights: int) -> float:
    """Return the most bits about one image in a split round.

    They are those of ``uses`` rows of the student, as many of the teacher, each of ``features`` numbers, and of the
    whole upload of ``weights`` numbers, which a server can make depend on that image alone.
    """
    return 2 * uses * feature_bits(policy, features) + upload_bits(policy, weights)
