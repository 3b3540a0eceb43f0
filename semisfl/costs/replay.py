"""Replay recorded runs with other connections, devices and codecs, without training them again.

Accuracies are the recorded ones: the accuracy lost to a codec is not simulated.

Runs record each client's bytes (``bytes_by_client``). Recorded studies have totals only. For them the bytes of a
client are computed from the method's formula and the active clients, scaled to the total, and marked as not exact.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from semisfl.costs.clock import RoundTime, World, time_round
from semisfl.costs.rounds import Bytes, ImageFacts, RoundCosts, drawn, recorded_images
from semisfl.methods.sizes import Cost, Sizes
from semisfl.metrics import RoundMetrics
from semisfl.runs.report import Run
from semisfl.settings import config as configs, lookup
from semisfl.settings.config import Config

# --- traffic ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoundTraffic:
    """The bytes of a round by client, kind and direction."""

    clients: Mapping[int, Bytes]
    exact: bool = True
    """Whether each client's bytes were recorded; otherwise only their sum was, and the rest is computed."""
    coded: bool = True
    """Whether all bytes could be converted to another codec; otherwise some are unchanged."""

    @property
    def total(self) -> int:
        """Return all bytes of the round."""
        return sum(size for sizes in self.clients.values() for size in sizes.values())


def traffic_of(rounds: Sequence[RoundMetrics], costs: RoundCosts) -> list[RoundTraffic]:
    """Return the bytes of every round, including those of attempts that were repeated.

    Raises ValueError for a round that does not record what was sent.
    """
    traffic, before, known = [], RoundMetrics(round=-1, bytes_total=0), set[int]()
    for now in rounds:
        traffic.append(_traffic_of_round(now, before, costs, known))
        before = now
        known.update(traffic[-1].clients)
    return traffic


def _traffic_of_round(
    now: RoundMetrics, before: RoundMetrics, costs: RoundCosts, known: Collection[int]
) -> RoundTraffic:
    """Return the bytes of round ``now``; ``known`` are the clients of the rounds before it."""
    if now.bytes_by_client is not None:
        each = {
            client: {kind: int(size) for kind, size in group.items() if kind != "clients"}
            for group in now.bytes_by_client
            for client in group["clients"]
        }
        return RoundTraffic(each)
    if now.bytes_total is None or before.bytes_total is None:
        raise ValueError(f"round {now.round} does not record what was sent (no bytes_total)")
    sent = now.bytes_total - before.bytes_total
    if not sent:
        return RoundTraffic({})
    active = drawn(costs.config, now.round)
    usual = (costs.usual or Cost(0, 0)).by_kind()
    if costs.once:
        # All clients send when the first round with clients begins, whether it draws them or not.
        everyone = range(costs.config.clients.total)
        active = tuple(client for client in everyone if client not in known) or active
        down = min(sent, len(active) * usual["model_down"])
        kinds = {"model_down": down, "features_up": sent - down}
    else:
        kinds = _by_formula(sent, usual, len(active), now, costs.sizes)
    return RoundTraffic(_shared(kinds, usual, active), exact=False)


def _by_formula(
    sent: int, usual: Bytes, active: int, metrics: RoundMetrics, sizes: Sizes
) -> dict[str, int]:
    """Divide a round's sum by kind as in the formula, and return the bytes of each kind.

    One kind takes the difference. Less than usual: some clients had no teacher, or nothing to upload.
    More than usual: helpers, or the first statistics.
    """
    kinds = {kind: active * size for kind, size in usual.items()}
    more = sent - sum(kinds.values())
    kind = "model_down" if more > 0 or metrics.contributing == active else "model_up"
    if more < 0 and "teacher_down" in kinds:
        kind = "teacher_down"
    if not kinds or kinds.get(kind, 0) + more < 0:
        return {"model_down": sent}
    # A method with BatchNorm greets a new client with the model, which sends its statistics back.
    greeted, rest = divmod(more, sizes.full + sizes.statistics)
    if more > 0 and sizes.statistics and not rest:
        kinds["model_up"] += greeted * sizes.statistics
        more -= greeted * sizes.statistics
    kinds[kind] += more
    return kinds


def _shared(
    kinds: Mapping[str, int], usual: Bytes, active: Sequence[int]
) -> dict[int, dict[str, int]]:
    """Divide each kind's bytes among clients: in usual portions if they fit, otherwise evenly."""
    each: dict[int, dict[str, int]] = {client: {} for client in active}
    for kind, size in kinds.items():
        portion = usual.get(kind, 0)
        count = size // portion if portion and size % portion == 0 else 0
        for place, client in enumerate(active):
            part = size * (place + 1) // len(active) - size * place // len(active)
            if 0 < count < len(active):
                part = portion if place < count else 0
            if part:
                each[client][kind] = part
    return each


# --- other codecs ------------------------------------------------------------------------------------


def recode_traffic(traffic: RoundTraffic, was: RoundCosts, now: RoundCosts) -> RoundTraffic:
    """Return the bytes of the same models, features and gradients in the codecs of ``now``."""
    if was.config.wire == now.config.wire:
        return traffic
    coded = True
    clients: dict[int, dict[str, int]] = {}
    for client, sizes in traffic.clients.items():
        clients[client] = {}
        for kind, size in sizes.items():
            new, exact = _recode_kind(kind, size, was, now)
            clients[client][kind] = new
            coded = coded and exact
    return replace(traffic, clients=clients, coded=coded)


def _recode_kind(kind: str, size: int, was: RoundCosts, now: RoundCosts) -> tuple[int, bool]:
    """Return the bytes in the new codec and True; or the old bytes and False if they cannot be divided."""
    new, rest = 0, size
    for before, after in zip(_tensor_sizes(kind, was), _tensor_sizes(kind, now), strict=True):
        if before:
            count, rest = divmod(rest, before)
            new += count * after
    return (size, False) if rest else (new, True)


def _tensor_sizes(kind: str, costs: RoundCosts) -> tuple[int, ...]:
    """Return the sizes of the tensors or states that make up a kind, the largest first."""
    sizes, steps = costs.sizes, costs.config.clients.steps
    if kind == "features_up" and costs.once:
        return (costs.image_bytes(),)
    if kind == "features_up":
        return ((sizes.student_features + sizes.teacher_features) // steps,)
    if kind == "gradients_down":
        return (sizes.gradients // steps,)
    if costs.usual is None or not costs.usual.features:
        return (sizes.full, sizes.statistics)
    return (sizes.bottom,)


# --- replays ----------------------------------------------------------------------------------------


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


def costs_of_run(run: Run, images: ImageFacts | None = None) -> RoundCosts:
    """Return the costs of a recorded run's method, model and cut.

    Without ``images`` the facts about its images are read from its directory. Raises ValueError for a run whose
    settings or network today's version does not know.
    """
    lookup.check_importable(run.config, f"{run.path}")
    try:
        config = configs.parse(run.config)
        if config.model.is_code:
            raise ValueError("its network was given to train() as code, which no file holds")
        return RoundCosts.of(config, images or recorded_images(config, run.path))
    except ValueError as error:
        raise ValueError(f"{run.path} cannot be replayed: {error}") from error


def replay(
    run: Run, world: World, codec: str | None = None, images: ImageFacts | None = None
) -> Replay:
    """Replay every round of ``run`` with the connections and devices of ``world``, all traffic in ``codec``.

    Without ``codec`` the recorded codecs stay. Connections and devices are drawn with the run's seed, so
    runs with one seed have the same ones. Raises ValueError for a run without bytes.
    """
    was = costs_of_run(run, images)
    config = was.config
    wire = config.wire.recoded(codec) if codec else config.wire
    now = replace(was, config=config.model_copy(update={"wire": wire}))
    try:
        traffic = [recode_traffic(one, was, now) for one in traffic_of(run.rounds, was)]
    except ValueError as error:
        raise ValueError(f"{run.path}: {error}") from error
    own = replace(world, seed=config.seed)
    times = []
    for metrics, one in zip(run.rounds, traffic, strict=True):
        steps = metrics.supervised_steps
        supervised = config.server.steps if steps is None else steps
        work = now.work(one.clients, supervised, metrics.contributing or 0)
        times.append(time_round(metrics.round, work, own))
    return Replay(run, now.config, traffic, times)


def bytes_by_kind(replays: Sequence[Replay]) -> dict[str, int]:
    """Return bytes by kind and direction (``model_down``, ``features_up``, ...), over all rounds and clients."""
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
