"""A virtual clock: how long rounds take over given links on given devices. It never sleeps.

Synchronous, as in the paper: an iteration of a split round ends with its slowest client, and so does a
round of whole models. Clients transfer side by side, each over its own link, and the server's own link
is never the bottleneck. What one client does, it does one thing after another: receive, compute, send.

A link's speed is drawn anew for each round, evenly between two limits; which device a client is stays.
Every draw is a function of (seed, round, client, purpose).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from semisfl import seeds
from semisfl.costs import PAPER_DOWN as PAPER_DOWN
from semisfl.costs import PAPER_UP as PAPER_UP
from semisfl.costs.profiles import Device, Profile
from semisfl.settings.sections import ConfigError

MEGABIT = 1e6 / 8
"""Bytes."""


@dataclass(frozen=True)
class Range:
    low: float
    high: float

    @classmethod
    def parse(cls, text: str, what: str) -> "Range":
        """``0.8-8``, or one number."""
        low, _, high = text.partition("-")
        try:
            found = cls(float(low), float(high or low))
        except ValueError:
            raise ConfigError(f"{what} {text!r} is no speed in Mbit/s; use 4 or 0.8-8") from None
        if not 0 < found.low <= found.high < float("inf"):
            raise ConfigError(
                f"{what} {text!r}: speeds are above 0, the lower one first, e.g. 0.8-8"
            )
        return found

    def at(self, draw: float) -> float:
        return self.low + draw * (self.high - self.low)

    def __str__(self) -> str:
        return f"{self.low:g}" + (f"–{self.high:g}" if self.high != self.low else "")


@dataclass(frozen=True)
class World:
    """Links and devices."""

    up: Range
    """Mbit/s from a client to the server."""
    down: Range
    latency: float
    """Seconds that every message takes besides its bytes."""
    profile: Profile
    seed: int = 0

    def rates(self, round_index: int, client: int) -> tuple[float, float]:
        """Bytes per second up and down of a client in a round."""
        up, down = (
            way.at(_draw(self.seed, purpose, round_index, client)) * MEGABIT
            for purpose, way in (("uplink", self.up), ("downlink", self.down))
        )
        return up, down

    def device(self, client: int) -> Device:
        return self.profile.pick(_draw(self.seed, "device", 0, client))


@lru_cache(maxsize=1 << 16)
def _draw(seed: int, purpose: str, round_index: int, client: int) -> float:
    return float(seeds.generator(seed, f"clock-{purpose}", round_index, client).random())


@dataclass(frozen=True)
class Share:
    """What one client does in a phase. Bytes and floating-point operations.

    It takes ``down``, computes ``before``, and sends ``up``. Where ``steps`` is not 0 there are as many
    exchanges in between: it computes ``forward``, sends ``step_up``, takes ``step_down`` and computes
    ``backward``, while the server computes ``server`` for it.
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
    """There and back, besides those of its steps."""


@dataclass(frozen=True)
class RoundWork:
    """A round: what the server computes alone, then phases that each end with their slowest client."""

    server: float
    phases: Sequence[Sequence[Share]] = ()

    @property
    def operations(self) -> float:
        """Return what the server and all clients compute together."""
        shares = [share for phase in self.phases for share in phase]
        return self.server + sum(
            share.before + share.steps * (share.forward + share.backward + share.server)
            for share in shares
        )


@dataclass
class ClientTime:
    """Seconds of a round; together they are the round's."""

    computing: float = 0.0
    sending: float = 0.0
    """Sending and receiving."""
    waiting: float = 0.0


@dataclass(frozen=True)
class RoundTime:
    round: int
    seconds: float
    server: float
    """Of them, the server computing."""
    clients: Mapping[int, ClientTime] = field(default_factory=dict)


def time_round(index: int, work: RoundWork, world: World) -> RoundTime:
    """The virtual seconds of round ``index``."""
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
    """A share's parts in seconds."""

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
        """From being asked to having answered, without steps."""
        return self.down + self.before + self.up + self.share.messages * self.latency

    @property
    def to_first(self) -> float:
        """From the round's start to the arrival of its first features."""
        return self.down + self.before + self.forward + self.step_up + 2 * self.latency

    @property
    def to_next(self) -> float:
        """From the server's step to the arrival of the next features."""
        exchanged = self.step_down + self.step_up + 2 * self.latency
        return exchanged + self.backward + self.forward

    @property
    def to_end(self) -> float:
        """From the server's last step to the arrival of its upload."""
        return self.step_down + self.backward + self.up + 2 * self.latency


def _phase(timed: Sequence[_Timed], world: World) -> tuple[float, float]:
    """Seconds of a phase, and of the server's computing in it."""
    there = [one for one in timed if one.share.steps]
    alone = max((one.alone for one in timed if not one.share.steps), default=0.0)
    if not there:
        return alone, 0.0
    seconds = max(one.to_first for one in there)
    server, done, left = 0.0, 0, there
    while left:
        # A client that broke off is waited for only in the steps it answered.
        until = min(one.share.steps for one in left)
        step = sum(one.share.server for one in left) / world.profile.server_flops
        server += (until - done) * step
        seconds += (until - max(done, 1)) * max(one.to_next for one in left)
        done, left = until, [one for one in left if one.share.steps > until]
    longest = max(one.share.steps for one in there)
    seconds += server + max(one.to_end for one in there if one.share.steps == longest)
    return max(seconds, alone), server
