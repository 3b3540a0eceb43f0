"""Device profiles: who computes how fast. The numbers that come with the package are assumed ones."""

import math
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from semisfl.settings.sections import ConfigError, Section

GIGA = 1e9


class Device(Section):
    name: str
    share: float = Field(1.0, gt=0)
    gflops: float = Field(math.inf, gt=0)
    """10^9 floating-point operations per second that it sustains in training."""
    memory_gb: float = Field(math.inf, gt=0)

    @property
    def flops(self) -> float:
        return self.gflops * GIGA


class Profile(Section):
    about: str = ""
    server_gflops: float = Field(math.inf, gt=0)
    devices: tuple[Device, ...] = Field(min_length=1)

    @property
    def server_flops(self) -> float:
        return self.server_gflops * GIGA

    @property
    def least_memory(self) -> float:
        """Bytes of the smallest device."""
        return min(device.memory_gb for device in self.devices) * GIGA

    def pick(self, draw: float) -> Device:
        """The device at ``draw`` in [0, 1) of all shares."""
        point = draw * sum(device.share for device in self.devices)
        for device in self.devices:
            point -= device.share
            if point < 0:
                return device
        return self.devices[-1]


def load(name: str) -> Profile:
    """A profile of the package by its name, or of one's own file: FILE.toml, or FILE.toml:NAME."""
    path, _, section = name.partition(".toml")
    if path == name:
        return _profile(_read(_own_file().read_text(encoding="utf-8"), "profiles.toml"), name, "")
    place, section = Path(f"{path}.toml"), section.removeprefix(":")
    try:
        found = _read(place.read_text(encoding="utf-8"), str(place))
    except OSError as error:
        raise ConfigError(f"cannot read {place}: {error.strerror or error}") from error
    if not section and len(found) == 1:
        section = next(iter(found))
    return _profile(found, section, f"{place}:")


def names() -> list[str]:
    return list(tomllib.loads(_own_file().read_text(encoding="utf-8")))


def _own_file() -> Any:
    return resources.files("semisfl.costs") / "profiles.toml"


def _read(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not TOML: {error}") from error


def _profile(found: dict[str, Any], name: str, where: str) -> Profile:
    if name not in found:
        known = ", ".join(f"{where}{one}" for one in found)
        raise ConfigError(
            f"profile {where}{name} is not known; known: {known}; or a file of one's own, FILE.toml"
        )
    try:
        return Profile.model_validate(found[name])
    except ValidationError as error:
        item = error.errors()[0]
        key = ".".join(str(piece) for piece in item["loc"])
        raise ConfigError(f"profile {where}{name}: {key}: {item['msg']}") from error
