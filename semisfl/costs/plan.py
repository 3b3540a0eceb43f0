"""Estimate the costs of each cut and each method before training, for chosen connections and devices."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from semisfl.costs.clock import World, time_round
from semisfl.costs.cuts import every_cut
from semisfl.costs.rounds import ImageFacts, RoundCosts, drawn
from semisfl.fleet.rows import TOGETHER
from semisfl.methods.sizes import Cost
from semisfl.settings import catalog, lookup
from semisfl.settings.config import Config

ROUNDS = 20
"""A plan's seconds are the mean of so many rounds, because connection speeds vary."""
DAY = 86_400.0
SPLIT_METHOD = "semisfl"
"""The method whose cuts are shown if the configured one does not split the model."""


@dataclass(frozen=True)
class Line:
    """The costs of a method at one cut. Bytes and seconds are those of one client in a round, unless said otherwise.

    If clients send once, with a frozen bottom, bytes are those of the whole run.
    """

    method: str
    title: str
    split: bool
    once: bool
    """Whether a client encodes its images once, and then has nothing to send."""
    cut: str
    index: int
    down: int
    up: int
    kinds: dict[str, int]
    features_per_step: int
    """Bytes that go up in an iteration."""
    gradients_per_step: int
    bottom_bytes: int
    """Bytes of the client's part of the model, as it is sent."""
    image_bytes: dict[str, int]
    """With a frozen bottom, the bytes of one image's rows in each codec, all views together."""
    client_flops: float
    """Operations of one client in an iteration; with a frozen bottom, for one image."""
    client_memory: int
    fits: bool
    """Whether the profile's smallest device has that much memory."""
    seconds: float
    """Mean seconds of a round; with a frozen bottom, of a first round in which all clients encode their images."""
    computing: float
    """Seconds in which an average client computes, sends and waits; they add up to the round."""
    sending: float
    waiting: float
    server_seconds: float
    """Mean seconds of a round in which the server computes; a part of ``seconds``."""
    alone_seconds: float
    """Seconds of a round without clients (``server.pretrain_rounds``)."""

    @property
    def total(self) -> int:
        """Return the bytes in both directions."""
        return self.down + self.up

    @property
    def rounds_per_day(self) -> float:
        """Return how many such rounds a day has; infinite if a round takes no time."""
        return DAY / self.seconds if self.seconds else math.inf


@dataclass(frozen=True)
class Plan:
    """The costs of all cuts of the split method, and of all methods at the configured cut.

    A cut fits if the profile's smallest device has the memory that it needs.
    """

    config: Config
    world: World
    cuts: list[Line]
    """Cuts of the split method, from the first layer to the last."""
    methods: list[Line]
    """All methods, at the configured cut; with a frozen bottom, those that cut the model."""
    trained_bytes: int
    """Bytes of a run of the split method whose clients train the configured bottom."""

    @property
    def chosen(self) -> Line:
        """Return the configured cut."""
        return next(line for line in self.cuts if line.index == self.methods[0].index)

    @property
    def best(self) -> Line:
        """Return the fastest cut that fits; among equal ones the configured cut, else the earliest."""
        # Without the last digits, in which equal cuts may differ.
        return min(self._fitting, key=lambda line: (float(f"{line.seconds:.9g}"), *self._tie(line)))

    @property
    def smallest(self) -> Line:
        """Return the cut with the fewest bytes among those that fit."""
        return min(self._fitting, key=lambda line: (line.total, *self._tie(line)))

    def _tie(self, line: Line) -> tuple[bool, int]:
        return line.index != self.chosen.index, line.index

    def groups(self) -> list[list[Line]]:
        """Return consecutive cuts that send the same, such as after a convolution and after its ReLU."""
        grouped: list[list[Line]] = []
        for line in self.cuts:
            if grouped and grouped[-1][0].kinds == line.kinds:
                grouped[-1].append(line)
            else:
                grouped.append([line])
        return grouped

    @property
    def _fitting(self) -> list[Line]:
        return [line for line in self.cuts if line.fits] or self.cuts

    @property
    def full(self) -> list[Line]:
        """Return the methods that exchange whole models."""
        return [line for line in self.methods if not line.split and line.total]

    def run_bytes(self, line: Line) -> int:
        """Return the bytes that all active clients send and receive in the whole run.

        Rounds in which the server trains alone send none.
        """
        config = self.config
        if not line.once:
            return line.total * config.clients.active * config.client_rounds
        rounds = range(config.server.pretrain_rounds, config.rounds)
        return line.total * len({client for index in rounds for client in drawn(config, index)})

    def run_hours(self, line: Line) -> float:
        """Return the virtual hours of the whole run, with the rounds in which the server trains alone."""
        together = self.config.client_rounds
        alone = self.config.rounds - together
        first = min(1, together)
        later = (together - first) * (line.server_seconds if line.once else line.seconds)
        return (line.seconds * first + later + line.alone_seconds * alone) / 3600

    def break_even_steps(self, line: Line, rival: Line) -> int:
        """Return the fewest steps K_u with which ``rival``, a full-model method, sends less than ``line``."""
        per_step = line.features_per_step + line.gradients_per_step
        models = line.total - per_step * self.config.clients.steps
        return max(1, (rival.total - models) // per_step + 1)


def group_name(group: Sequence[Line]) -> str:
    """Return the name of cuts that send the same: ``conv1–relu1``."""
    return "–".join(dict.fromkeys((group[0].cut, group[-1].cut)))


def make(
    config: Config,
    images: ImageFacts,
    world: World,
    config_of: Callable[[str], Config] | None = None,
    others: Sequence[str] = (),
) -> Plan:
    """Return the plan of a run: the costs of every cut, and of every method at the configured cut.

    ``images`` and ``world`` are what the costs depend on besides the settings. ``config_of`` returns the run's
    configuration with another method; by default the other methods have ``config``. ``others`` are further
    methods, which may be named by their path.
    """
    own, frozen = RoundCosts.of(config, images), config.clients.bottom == "frozen"
    entries = {name: one for name, one in catalog.METHODS.items() if not (frozen and one.works)}
    for name in (config.method, *others):
        entries.setdefault(name, lookup.method(name))
    priced = [
        own.by(entry, config_of(name) if config_of else config) for name, entry in entries.items()
    ]
    methods = [line for one in priced if (line := _line(one, world))]
    is_split = own.usual is not None and own.usual.features > 0
    split = own if is_split else replace(own, entry=lookup.method(SPLIT_METHOD))
    cuts = [_line(split.at(cut.index), world) for cut in every_cut(own.cut)]
    clients = config.clients.model_copy(update={"bottom": "trained"})
    trained = replace(split, config=config.model_copy(update={"clients": clients})).usual
    sent = (trained or Cost(0, 0)).total * clients.active * config.client_rounds
    return Plan(config, world, [line for line in cuts if line], methods, sent)


def _line(costs: RoundCosts, world: World) -> Line | None:
    """Return the costs of a method at a cut; None if it has no formula."""
    cost, config, cut = costs.usual, costs.config, costs.cut
    if cost is None:
        return None
    batch, split, once = config.clients.batch, cost.features > 0, costs.once
    memory = cut.memory(batch, cost.work.copies, cost.work.kept, whole=not split)
    memory = cut.encoding_memory(TOGETHER) if once else memory
    flops = (1 if once else batch) * (cut.bottom_flops if split else cut.flops)
    seconds, server, shares = _mean_round(costs, world)
    there = bool(cost.total)  # Supervised-only asks nothing of clients
    return Line(
        method=costs.entry.name,
        title=costs.entry.title,
        split=split,
        once=once,
        cut=cut.name,
        index=cut.index,
        down=cost.down,
        up=cost.up,
        kinds=cost.by_kind(),
        features_per_step=0 if once else cost.features // config.clients.steps,
        gradients_per_step=cost.gradients // config.clients.steps,
        bottom_bytes=there * (costs.sizes.bottom if split else costs.sizes.full),
        image_bytes={codec: costs.image_bytes(codec) for codec in catalog.CODECS if once},
        client_flops=there * cost.work.client * flops,
        client_memory=there * memory,
        fits=not there or memory <= world.profile.least_memory,
        seconds=seconds,
        computing=shares[0],
        sending=shares[1],
        waiting=shares[2],
        server_seconds=server,
        alone_seconds=time_round(0, costs.work({}, config.server.steps), world).seconds,
    )


def _mean_round(costs: RoundCosts, world: World) -> tuple[float, float, tuple[float, float, float]]:
    """Return the seconds of a round, the server's part, and an average client's computing, sending and waiting."""
    timed, everyone = [], range(costs.config.clients.total)
    for index in range(ROUNDS):
        active = everyone if costs.once else drawn(costs.config, index)
        timed.append(time_round(index, costs.usual_work(active), world))
    each = [times for one in timed for times in one.clients.values()]
    parts = ([t.computing for t in each], [t.sending for t in each], [t.waiting for t in each])
    shares = tuple(fmean(part) if part else 0.0 for part in parts)
    seconds, server = fmean(t.seconds for t in timed), fmean(t.server for t in timed)
    return seconds, server, (shares[0], shares[1], shares[2])
