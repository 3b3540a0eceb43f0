"""Device profiles: how fast devices compute. The numbers that come with the package are assumed."""

import math
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from semisfl.settings.mistakes import one_line
from semisfl.settings.plain_values import read
from semisfl.settings.sections import ConfigError, Section

GIGA = 1e9


class Device(Section):
    """A kind of device, and its share of the clients."""

    name: str
    share: float = Field(1.0, gt=0)
    gflops: float = Field(math.inf, gt=0)
    """Sustained speed in training, in 10^9 floating-point operations per second."""
    memory_gb: float = Field(math.inf, gt=0)

    @property
    def flops(self) -> float:
        return self.gflops * GIGA


class Profile(Section):
    """The server's speed and the kinds of devices."""

    about: str = ""
    server_gflops: float = Field(math.inf, gt=0)
    devices: tuple[Device, ...] = Field(min_length=1)

    @property
    def server_flops(self) -> float:
        return self.server_gflops * GIGA

    @property
    def least_memory(self) -> float:
        """Return the bytes of memory of the smallest device."""
        return min(device.memory_gb for device in self.devices) * GIGA

    def pick(self, draw: float) -> Device:
        """Return the device at ``draw`` in [0, 1) of all shares."""
        point = draw * sum(device.share for device in self.devices)
        for device in self.devices:
            point -= device.share
            if point < 0:
                return device
        return self.devices[-1]


def load(name: str) -> Profile:
    """Return a profile of the package by name, or one from a file: FILE.toml, or FILE.toml:NAME."""
    path, _, section = name.partition(".toml")
    if path == name:
        file = resources.files("semisfl.costs") / "profiles.toml"
        return _profile(tomllib.loads(file.read_text(encoding="utf-8")), name, "")
    place, section = Path(f"{path}.toml"), section.removeprefix(":")
    profiles = {key: value for key, value in read(place).items() if isinstance(value, dict)}
    if not section and len(profiles) == 1:
        section = next(iter(profiles))
    return _profile(profiles, section, f"{place}:")


def _profile(profiles: dict[str, Any], name: str, where: str) -> Profile:
    if name not in profiles:
        known = ", ".join(f"{where}{one}" for one in profiles) or "none"
        raise ConfigError(
            f"profile {where}{name} is not known; known: {known}; or a file of your own, FILE.toml"
        )
    try:
        return Profile.model_validate(profiles[name])
    except ValidationError as error:
        line = one_line(error, Profile, list(Profile.model_fields))
        raise ConfigError(f"profile {where}{name}: {line}") from error
