"""Compute the traffic of a recorded run by kind, direction, client and round, also with other codecs.

Runs record it (``bytes_by_client``). Brief records have totals only. For them it is computed from the method's
formula and the active clients, scaled to the recorded total, and marked as not exact.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from semisfl.costs.rounds import Bytes, Priced
from semisfl.fleet.base import draw_active
from semisfl.methods.sizes import Cost, Sizes
from semisfl.metrics import RoundMetrics


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
        return sum(size for sizes in self.clients.values() for size in sizes.values())


def traffic_of(rounds: Sequence[RoundMetrics], priced: Priced) -> list[RoundTraffic]:
    """Return the bytes of every round, including those of attempts that were repeated."""
    traffic, before = [], RoundMetrics(round=-1, bytes={}, bytes_total=0)
    for now in rounds:
        traffic.append(_one(now, before, priced))
        before = now
    return traffic


def _one(now: RoundMetrics, before: RoundMetrics, priced: Priced) -> RoundTraffic:
    if now.bytes_by_client is not None:
        try:
            each = {
                client: {kind: int(size) for kind, size in group.items() if kind != "clients"}
                for group in now.bytes_by_client
                for client in group["clients"]
            }
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"round {now.round} has a damaged bytes_by_client: {error!r:.80}"
            ) from error
        return RoundTraffic(each)
    if now.bytes_total is None or before.bytes_total is None:
        raise ValueError(f"round {now.round} does not record what was sent (no bytes_total)")
    sent = now.bytes_total - before.bytes_total
    if not sent:
        return RoundTraffic({})
    seed, clients = priced.config.seed, priced.config.clients
    # The clients drawn for the round, if all were present.
    active = draw_active(seed, now.round, clients.total, range(clients.total), clients.active)
    usual = (priced.usual or Cost(0, 0)).by_kind()
    if now.bytes is not None and before.bytes is not None:
        kinds = {kind: size - before.bytes.get(kind, 0) for kind, size in now.bytes.items()}
    else:
        kinds = _by_formula(sent, usual, len(active), now, priced.sizes)
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


def recoded(traffic: RoundTraffic, was: Priced, now: Priced) -> RoundTraffic:
    """Return the bytes of the same models, features and gradients in the codecs of ``now``."""
    if was.config.wire == now.config.wire:
        return traffic
    coded = True
    clients: dict[int, dict[str, int]] = {}
    for client, sizes in traffic.clients.items():
        clients[client] = {}
        for kind, size in sizes.items():
            new, exact = _recoded_one(kind, size, was, now)
            clients[client][kind] = new
            coded = coded and exact
    return replace(traffic, clients=clients, coded=coded)


def _recoded_one(kind: str, size: int, was: Priced, now: Priced) -> tuple[int, bool]:
    """Return the bytes in the new codec and True; or the old bytes and False if they cannot be divided."""
    new, rest = 0, size
    for before, after in zip(_things(kind, was), _things(kind, now), strict=True):
        if before:
            count, rest = divmod(rest, before)
            new += count * after
    return (size, False) if rest else (new, True)


def _things(kind: str, priced: Priced) -> tuple[int, ...]:
    """Return the sizes of the tensors or states that make up a kind, the largest first."""
    sizes, steps = priced.sizes, priced.config.clients.steps
    if kind == "features_up":
        return ((sizes.student_features + sizes.teacher_features) // steps,)
    if kind == "gradients_down":
        return (sizes.gradients // steps,)
    if priced.usual is None or not priced.usual.features:
        return (sizes.full, sizes.statistics)
    return (sizes.bottom,)
