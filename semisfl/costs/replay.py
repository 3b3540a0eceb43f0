"""Replay recorded runs with other connections, devices and codecs, without training them again.

Accuracies are the recorded ones: the accuracy lost to a codec is not simulated.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from semisfl.costs import about_images
from semisfl.costs.about_images import AboutImages
from semisfl.costs.clock import RoundTime, World, time_round
from semisfl.costs.rounds import Priced
from semisfl.costs.traffic import RoundTraffic, recoded, traffic_of
from semisfl.metrics import RoundMetrics
from semisfl.runs.grouping import Run
from semisfl.settings import config as configs
from semisfl.settings import lookup
from semisfl.settings.config import Config


@dataclass(frozen=True)
class Replay:
    """A replayed run: the bytes and the seconds of each round."""

    run: Run
    config: Config
    """The run's configuration with the replay's codecs."""
    traffic: list[RoundTraffic]
    times: list[RoundTime]

    @property
    def seconds(self) -> list[float]:
        """Return the seconds of each round."""
        return [time.seconds for time in self.times]

    @cached_property
    def rounds(self) -> list[RoundMetrics]:
        """Return the run's round metrics with the replay's bytes and seconds."""
        replayed, total = [], 0
        for metrics, sent, time in zip(self.run.rounds, self.traffic, self.times, strict=True):
            total += sent.total
            new = replace(metrics, seconds=time.seconds, bytes_total=total, bytes=None)
            replayed.append(replace(new, seconds_training=None, seconds_testing=None))
        return replayed

    def as_run(self) -> Run:
        """Return a run for reports and pictures; its configuration keeps the recorded limits and codecs."""
        return replace(self.run, rounds=self.rounds)


def price(run: Run, images: AboutImages | None = None) -> Priced:
    """Return the costs of a recorded run's configuration and model; without ``images`` its directory is read."""
    lookup.check_importable(run.config["method"], f"{run.path}")
    try:
        config = configs.parse(run.config)
        if config.model.is_code:
            raise ValueError("its network was given to train() as code, which no file holds")
        return Priced.of(config, images or about_images.recorded(config, run.path))
    except ValueError as error:
        raise ValueError(f"{run.path} cannot be replayed: {error}") from error


def replay(
    run: Run, world: World, codec: str | None = None, images: AboutImages | None = None
) -> Replay:
    """Replay every round of ``run`` with the connections and devices of ``world``, all traffic in ``codec``.

    Without ``codec`` the recorded codecs stay. Connections and devices are drawn with the run's seed, so
    runs with one seed have the same ones.
    """
    was = price(run, images)
    config = was.config
    wire = config.wire.recoded(codec) if codec else config.wire
    now = replace(was, config=config.model_copy(update={"wire": wire}))
    try:
        traffic = [recoded(one, was, now) for one in traffic_of(run.rounds, was)]
    except ValueError as error:
        raise ValueError(f"{run.path}: {error}") from error
    own = replace(world, seed=config.seed)
    times = []
    for metrics, one in zip(run.rounds, traffic, strict=True):
        steps = metrics.supervised_steps
        work = now.work(one.clients, config.server.steps if steps is None else steps)
        times.append(time_round(metrics.round, work, own))
    return Replay(run, now.config, traffic, times)


def bytes_by_kind(replays: Sequence[Replay]) -> dict[str, int]:
    """Return bytes by kind and direction, over all rounds and clients."""
    totals: Counter[str] = Counter()
    for one in replays:
        for sent in one.traffic:
            for sizes in sent.clients.values():
                totals.update(sizes)
    return dict(sorted(totals.items()))


def shares(replays: Sequence[Replay]) -> tuple[float, float, float]:
    """Return the shares of an active client's time: computing, sending, waiting. All 0 without clients."""
    each = [times for one in replays for time in one.times for times in time.clients.values()]
    spent = [
        sum(times.computing for times in each),
        sum(times.sending for times in each),
        sum(times.waiting for times in each),
    ]
    total = sum(spent) or 1.0
    return spent[0] / total, spent[1] / total, spent[2] / total
