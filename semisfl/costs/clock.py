"""A virtual clock: computes how long rounds take with chosen connections and devices. It never sleeps.

Rounds are synchronous, as in the paper: an iteration of a split round ends with its slowest client, and so
does a full round. Clients transfer in parallel, each over its own connection. The server's connection is
never the bottleneck. A client does one thing at a time: receive, compute, send.

A connection's speed is drawn uniformly between two limits for each round. A client's device is drawn once.
Every draw is a function of (seed, round, client, purpose).
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from semisfl import seeds
from semisfl.settings.plain_values import read
from semisfl.settings.sections import ConfigError, Section, one_line

# --- devices ----------------------------------------------------------------------------------------


GIGA = 1e9


class DeviceKind(Section):
    """A kind of device, and its share of the clients. The numbers that come with the package are assumed."""

    name: str
    share: float = Field(1.0, gt=0)
    """Weight of this kind among all kinds of the profile."""
    gflops: float = Field(math.inf, gt=0)
    """Sustained speed in training, in 10^9 floating-point operations per second."""
    memory_gb: float = Field(math.inf, gt=0)
    """Memory in 10^9 bytes, which `plan` compares with what a cut needs."""

    @property
    def flops(self) -> float:
        """Return the floating-point operations per second."""
        return self.gflops * GIGA


class Profile(Section):
    """The server's speed and the kinds of devices."""

    about: str = ""
    server_gflops: float = Field(math.inf, gt=0)
    devices: tuple[DeviceKind, ...] = Field(min_length=1)

    @property
    def server_flops(self) -> float:
        """Return the server's floating-point operations per second."""
        return self.server_gflops * GIGA

    @property
    def least_memory(self) -> float:
        """Return the bytes of memory of the smallest device."""
        return min(device.memory_gb for device in self.devices) * GIGA

    def pick(self, draw: float) -> DeviceKind:
        """Return the device at ``draw`` in [0, 1) of all shares."""
        point = draw * sum(device.share for device in self.devices)
        for device in self.devices:
            point -= device.share
            if point < 0:
                return device
        return self.devices[-1]


def load_profile(name: str) -> Profile:
    """Return a profile of the package by its name, or one from a file: FILE.toml, or FILE.toml:NAME.

    A file with one profile needs no NAME. Raises ConfigError for an unknown name or a wrong value.
    """
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


# --- connections and the clock ------------------------------------------------------------------------


MEGABIT = 1e6 / 8
"""Bytes per megabit."""


@dataclass(frozen=True)
class LinkSpeed:
    """Limits of a speed in Mbit/s."""

    low: float
    high: float

    @classmethod
    def parse(cls, text: str, option: str) -> "LinkSpeed":
        """Return the limits in ``0.8-8``, or one number as both; ConfigError names the ``option`` if there are none."""
        low, _, high = text.partition("-")
        try:
            limits = cls(float(low), float(high or low))
        except ValueError:
            raise ConfigError(f"{option} {text!r} is no speed in Mbit/s; use 4 or 0.8-8") from None
        if not 0 < limits.low <= limits.high < float("inf"):
            raise ConfigError(
                f"{option} {text!r}: speeds are above 0, the lower one first, e.g. 0.8-8"
            )
        return limits

    def at(self, draw: float) -> float:
        """Return the speed at ``draw`` in [0, 1)."""
        return self.low + draw * (self.high - self.low)

    def __str__(self) -> str:
        return f"{self.low:g}" + (f"–{self.high:g}" if self.high != self.low else "")


@dataclass(frozen=True)
class World:
    """The connections and devices of a virtual fleet. All draws follow from ``seed``."""

    up: LinkSpeed
    """Mbit/s from a client to the server."""
    down: LinkSpeed
    latency: float
    """Seconds that every message takes besides its bytes."""
    profile: Profile
    seed: int = 0

    @classmethod
    def of(cls, uplink: str, downlink: str, latency: float, profile: str, seed: int = 0) -> "World":
        """Return the world of a command's options; ``latency`` is in milliseconds."""
        up, down = LinkSpeed.parse(uplink, "--uplink"), LinkSpeed.parse(downlink, "--downlink")
        return cls(up, down, latency / 1000, load_profile(profile), seed)

    def described(self, profile: str) -> str:
        """Return the connections and devices in two sentences; ``profile`` is the name given to them."""
        return (
            f"Connections: {self.up} Mbit/s up, {self.down} down, {1000 * self.latency:g} ms per message. "
            f"Devices: {profile} ({self.profile.about})."
        )

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        links = {"up": asdict(self.up), "down": asdict(self.down), "latency": self.latency}
        return {"links": links, "profile": self.profile.model_dump(mode="json")}

    def rates(self, round_index: int, client: int) -> tuple[float, float]:
        """Return a client's bytes per second up and down in a round."""
        up, down = (
            way.at(_draw(self.seed, purpose, round_index, client)) * MEGABIT
            for purpose, way in (("uplink", self.up), ("downlink", self.down))
        )
        return up, down

    def device(self, client: int) -> DeviceKind:
        """Return a client's device."""
        return self.profile.pick(_draw(self.seed, "device", 0, client))


@lru_cache(maxsize=1 << 16)
def _draw(seed: int, purpose: str, round_index: int, client: int) -> float:
    return float(seeds.generator(seed, f"clock-{purpose}", round_index, client).random())


@dataclass(frozen=True)
class Share:
    """One client's part of a phase, in bytes and floating-point operations.

    The client receives ``down``, computes ``before`` and sends ``up``. Between them it takes ``steps``
    steps. In each it computes ``forward``, sends ``step_up``, receives ``step_down`` and computes
    ``backward``; the server computes ``server`` for it.
    """

    client: int
    down: float
    up: float
    before: float = 0.0
    steps: int = 0
    forward: float = 0.0
    step_up: float = 0.0
    step_down: float = 0.0
    backward: float = 0.0
    server: float = 0.0
    messages: int = 2
    """Messages in both directions, without those of the steps."""


@dataclass(frozen=True)
class RoundWork:
    """A round: the server computes alone, then phases follow that each end with their slowest client."""

    server: float
    phases: Sequence[Sequence[Share]] = ()


@dataclass
class ClientTime:
    """The seconds that a client spends in a round; the three add up to the round."""

    computing: float = 0.0
    sending: float = 0.0
    """Seconds of sending and receiving."""
    waiting: float = 0.0


@dataclass(frozen=True)
class RoundTime:
    """The virtual seconds of one round."""

    round: int
    seconds: float
    server: float
    """Seconds in which the server computes; a part of ``seconds``."""
    clients: Mapping[int, ClientTime] = field(default_factory=dict)


def time_round(index: int, work: RoundWork, world: World) -> RoundTime:
    """Return the virtual seconds of a round, and how each client spends them.

    ``index`` is the round's number, counted from 0: connection speeds are drawn for it.
    """
    server = work.server / world.profile.server_flops
    seconds = server
    clients: dict[int, ClientTime] = {}
    for phase in work.phases:
        timed = [_Timed(share, index, world) for share in phase]
        if timed:
            took, computed = _phase(timed, world)
            seconds, server = seconds + took, server + computed
        for one in timed:
            times = clients.setdefault(one.share.client, ClientTime())
            times.computing += one.computing
            times.sending += one.sending
    for times in clients.values():
        times.waiting = seconds - times.computing - times.sending
    return RoundTime(index, seconds, server, clients)


class _Timed:
    """A client's share of a phase in seconds, over the connection and on the device that it drew."""

    def __init__(self, share: Share, index: int, world: World) -> None:
        up, down = world.rates(index, share.client)
        speed, self.share, self.latency = world.device(share.client).flops, share, world.latency
        self.down, self.up = share.down / down, share.up / up
        self.before = share.before / speed
        self.forward, self.backward = share.forward / speed, share.backward / speed
        self.step_up, self.step_down = share.step_up / up, share.step_down / down

    @property
    def computing(self) -> float:
        return self.before + self.share.steps * (self.forward + self.backward)

    @property
    def sending(self) -> float:
        messages = self.share.messages + 2 * self.share.steps
        bytes_alone = self.down + self.up + self.share.steps * (self.step_up + self.step_down)
        return bytes_alone + messages * self.latency

    @property
    def alone(self) -> float:
        """Return the seconds from the request to the answer of a client without steps."""
        return self.down + self.before + self.up + self.share.messages * self.latency

    @property
    def to_first(self) -> float:
        """Return the seconds from the round's start to the arrival of the first features."""
        return self.down + self.before + self.forward + self.step_up + 2 * self.latency

    @property
    def to_next(self) -> float:
        """Return the seconds from the server's step to the arrival of the next features."""
        transfer = self.step_down + self.step_up + 2 * self.latency
        return transfer + self.backward + self.forward

    @property
    def to_end(self) -> float:
        """Return the seconds from the server's last step to the arrival of the upload."""
        return self.step_down + self.backward + self.up + 2 * self.latency


def _phase(timed: Sequence[_Timed], world: World) -> tuple[float, float]:
    """Return the seconds of a phase, and those of them in which the server computes.

    Clients without steps only answer once. The others take steps together: the server computes for all that
    are left, then waits for the slowest of them.
    """
    there = [one for one in timed if one.share.steps]
    alone = max((one.alone for one in timed if not one.share.steps), default=0.0)
    if not there:
        return alone, 0.0
    seconds = max(one.to_first for one in there)
    server, done, left = 0.0, 0, there
    while left:
        # The server waits for a client that left only in the steps that it answered.
        until = min(one.share.steps for one in left)
        step = sum(one.share.server for one in left) / world.profile.server_flops
        server += (until - done) * step
        seconds += (until - max(done, 1)) * max(one.to_next for one in left)
        done, left = until, [one for one in left if one.share.steps > until]
    longest = max(one.share.steps for one in there)
    seconds += server + max(one.to_end for one in there if one.share.steps == longest)
    return max(seconds, alone), server
