"""What crossed in a recorded run: by kind, direction, client and round, also under other codecs.

Runs say it themselves (``bytes_by_client``). Of older files, which have totals only, it is worked out from
the method's formula and from who was drawn; where that does not give the recorded sum, it is said.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from semisfl.costs.rounds import Bytes, Priced
from semisfl.fleet.base import draw_active
from semisfl.methods.sizes import Cost, Sizes
from semisfl.metrics import RoundMetrics
from semisfl.settings.config import Config


@dataclass(frozen=True)
class Crossed:
    """A round's bytes."""

    round: int
    clients: Mapping[int, Bytes]
    exact: bool = True
    """Whether they are the recorded ones; else their sum is, and who sent what is worked out."""
    coded: bool = True
    """Whether all of it could be put into another codec; else some is as it was."""

    @property
    def total(self) -> int:
        return sum(size for sizes in self.clients.values() for size in sizes.values())


def crossed_in(rows: Sequence[RoundMetrics], priced: Priced) -> list[Crossed]:
    """What crossed in every round, those of attempts included that had to be repeated."""
    found, before = [], RoundMetrics(round=-1, bytes={}, bytes_total=0)
    for row in rows:
        found.append(_one(row, before, priced))
        before = row
    return found


def _one(row: RoundMetrics, before: RoundMetrics, priced: Priced) -> Crossed:
    if row.bytes_by_client is not None:
        each = {
            client: {kind: size for kind, size in group.items() if kind != "clients"}
            for group in row.bytes_by_client
            for client in group["clients"]
        }
        return Crossed(row.round, each)
    if row.bytes_total is None or before.bytes_total is None:
        raise ValueError(f"round {row.round} does not say what was sent (no bytes_total)")
    sent = row.bytes_total - before.bytes_total
    if not sent:
        return Crossed(row.round, {})
    active = _active(row, priced.config)
    usual = (priced.usual or Cost(0, 0)).by_kind()
    if row.bytes is not None and before.bytes is not None:
        kinds = {kind: size - before.bytes.get(kind, 0) for kind, size in row.bytes.items()}
    else:
        kinds = _by_formula(sent, usual, len(active), row, priced.sizes)
    return Crossed(row.round, _shared(kinds, usual, active), exact=False)


def _active(row: RoundMetrics, config: Config) -> tuple[int, ...]:
    """Who was drawn, if all were there."""
    clients = config.clients
    everyone = range(clients.total)
    return draw_active(config.seed, row.round, clients.total, everyone, clients.active)


def _by_formula(
    sent: int, usual: Bytes, active: int, row: RoundMetrics, sizes: Sizes
) -> dict[str, int]:
    """A round's sum by kind: as the formula has it, but for teachers, uploads or helpers.

    Less than usual: some had no teacher, or nothing to upload. More: helpers, or the first statistics.
    """
    kinds = {kind: active * size for kind, size in usual.items()}
    more = sent - sum(kinds.values())
    kind = "model_down" if more > 0 or row.contributing == active else "model_up"
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
    """Each kind's bytes among clients: usual portions as far as they go, the rest evenly."""
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


def recoded(crossed: Crossed, was: Priced, now: Priced) -> Crossed:
    """The same models, features and gradients in the codecs of ``now``."""
    if was.config.wire == now.config.wire:
        return crossed
    coded = True
    clients: dict[int, dict[str, int]] = {}
    for client, sizes in crossed.clients.items():
        clients[client] = {}
        for kind, size in sizes.items():
            new, whole = _recoded_one(kind, size, was, now)
            clients[client][kind] = new
            coded = coded and whole
    return replace(crossed, clients=clients, coded=coded)


def _recoded_one(kind: str, size: int, was: Priced, now: Priced) -> tuple[int, bool]:
    """The bytes of as many things; False: they are no whole number of things, and stay as they are."""
    if kind == "features_up" and was.config.wire.teacher_once:
        # How many rows crossed is not recorded.
        return size, False
    new, rest = 0, size
    for before, after in zip(_things(kind, was), _things(kind, now), strict=True):
        if before:
            count, rest = divmod(rest, before)
            new += count * after
    return (size, False) if rest else (new, True)


def _things(kind: str, priced: Priced) -> tuple[int, ...]:
    """Bytes of what a kind is made of, the largest first."""
    sizes, steps = priced.sizes, priced.config.clients.steps
    if kind == "features_up":
        return ((sizes.student_features + sizes.teacher_features) // steps,)
    if kind == "gradients_down":
        return (sizes.gradients // steps,)
    if priced.usual is None or not priced.usual.features:
        return (sizes.full, sizes.statistics)
    return (sizes.bottom,)
