"""Combine several clients' states: the plain mean, and rules that bound one client's influence.

A rule sees what the clients changed, as rows of one matrix of *updates* (state minus what the server
sent), so that skewed data does not count against a client. Rules are entries of
`semisfl.settings.catalog.AGGREGATES`; reproduction/pages/poisoning.md says which attack each rule stops.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from semisfl.fleet.base import HeldBack, State, mean_state
from semisfl.settings import lookup
from semisfl.settings.robust import FEWEST, AttackerShare, ClippedMean, RobustConfig
from semisfl.settings.sections import ConfigError, Section

FAR = 3.0
"""Multiple of the median client's distance from the result. `trimmed_mean` and `median` leave every
client out of some values; they report a client as held back only beyond this distance."""

UNEVEN = 6.0
"""Multiple of the longest update of a tensor that is taken. `clipped_mean` reports a client as held back for a
tensor only beyond this: honest clients are at twice in one tensor or another."""


class Combined(NamedTuple):
    """The result of an aggregation rule."""

    update: Tensor
    """[values]: the combined update."""
    held_back: Mapping[int, str]
    """Row of each client that counted for less than its share, with the reason."""


Rule = Callable[..., Combined]
"""Combine updates [clients, values] by the rule's own settings; `clipped_mean` also gets the sizes of tensors."""


def combine(
    settings: RobustConfig,
    states: Mapping[int, State],
    reference: State,
    held_back: HeldBack,
) -> State:
    """Return the states of several clients as one.

    ``states``: each client's state. ``reference``: the state that they were sent. ``settings`` choose the
    rule; ``held_back`` receives who counted for less, and why. Fewer than `FEWEST` clients are averaged
    whatever the rule: none of two can be the judge of the other.

    Raises `ConfigError` if a rule of another package returns an update of a wrong shape.
    """
    rows = list(states.values())
    if settings.aggregate == "mean" or len(rows) < FEWEST:
        return mean_state(rows)
    first = rows[0]
    groups = _groups(first)
    floating = {name for names in groups.values() for name in names}
    result = mean_state([{k: v for k, v in state.items() if k not in floating} for state in rows])
    for group, names in groups.items():
        sent = _flat(reference, names, first[names[0]].device)
        updates = torch.stack([_flat(state, names) for state in rows]) - sent
        tensors = {name: first[name].numel() for name in names}
        rule = rule_named(settings.aggregate)
        # Rules of other packages know the updates and their settings alone.
        sizes = (tensors,) if rule is clipped_mean else ()
        combined = rule(updates, settings.of_rule, *sizes)
        if combined.update.shape != sent.shape:
            raise ConfigError(
                f"robust.aggregate = {settings.aggregate!r} returned an update of shape "
                f"{list(combined.update.shape)}; it must be {list(sent.shape)}"
            )
        for place, client in enumerate(states):
            if place in combined.held_back:
                held_back.add(client, group + combined.held_back[place])
        values = (sent + combined.update).split([*tensors.values()])
        for name, value in zip(names, values, strict=True):
            # A combined update can make a variance negative even where no client's update does.
            value = value.clamp(min=0) if name.endswith("running_var") else value
            result[name] = value.view(first[name].shape).to(first[name].dtype)
    return {name: result[name] for name in first}


def long_updates(states: Mapping[int, State], reference: State) -> set[int]:
    """Return the clients whose update is over twice as long as the median one; none of fewer than `FEWEST`."""
    if len(states) < FEWEST:
        return set()
    first, too_long = next(iter(states.values())), set()
    for names in _groups(first).values():
        sent = _flat(reference, names, first[names[0]].device)
        lengths = torch.stack([(_flat(state, names) - sent).norm() for state in states.values()])
        beyond = (lengths > 2 * lengths.quantile(0.5)).tolist()
        too_long |= {client for client, long in zip(states, beyond, strict=True) if long}
    return too_long


def _groups(state: State) -> dict[str, list[str]]:
    """Return the names of weights, of running means and of running variances, by the prefix of their reasons.

    They have different units. In one norm, large statistics would hide a long update of weights.
    """
    groups: dict[str, list[str]] = {}
    for name, value in state.items():
        if value.is_floating_point():
            last = name.rpartition(".")[2]
            statistics = last in ("running_mean", "running_var")
            groups.setdefault(f"{last}: " if statistics else "", []).append(name)
    return groups


@cache
def rule_named(name: str) -> Rule:
    """Return the function of a catalog entry; raise `ConfigError` if it cannot be called."""
    place = lookup.aggregate(name).code
    rule: Rule = lookup.load(place)
    if not callable(rule):
        raise ConfigError(f"{place} is not an aggregation rule: it cannot be called")
    return rule


def _flat(state: State, names: Sequence[str], device: torch.device | None = None) -> Tensor:
    """Return the named tensors of a state as one row of float32 values."""
    return torch.cat([state[name].detach().to(device).float().reshape(-1) for name in names])


# --- the rules ------------------------------------------------------------------------------------


def mean(updates: Tensor, settings: Section) -> Combined:
    """Average all updates [clients, values]."""
    return Combined(updates.mean(0), {})


def trimmed_mean(updates: Tensor, settings: AttackerShare) -> Combined:
    """Average each value without its largest and smallest, as many of each as there may be attackers."""
    # Without the small number, 0.07 of 100 clients would be 8.
    return _without_ends(updates, math.ceil(settings.attackers * len(updates) - 1e-9))


def median(updates: Tensor, settings: Section) -> Combined:
    """Take the median of each value over the clients."""
    return _without_ends(updates, len(updates))


def clipped_mean(
    updates: Tensor, settings: ClippedMean, tensors: Mapping[str, int] | None = None
) -> Combined:
    """Shorten updates longer than ``limit`` times the median length to that length, then average.

    First what each client changed of each of the ``tensors`` (name -> size), then all of it. Else a client could put
    the length of its whole update into one small layer, where it does most harm.
    """
    sizes = tensors or {"all": updates.shape[1]}
    parts = updates.split([*sizes.values()], dim=1)
    lengths = torch.stack([part.norm(dim=1) for part in parts])
    shares = _shares(lengths, settings.limit * _usual(lengths))
    whole = lengths.norm(dim=0)
    together = _shares((lengths * shares).norm(dim=0), settings.limit * _usual(whole))
    scaled = [
        (part * (share * together).unsqueeze(1)).mean(0)
        for part, share in zip(parts, shares, strict=True)
    ]
    return Combined(torch.cat(scaled), _reasons(lengths, shares, [*sizes], settings.limit))


def _shares(lengths: Tensor, most: Tensor) -> Tensor:
    """Return by what to multiply updates of these ``lengths`` [..., clients], so that none is longer than ``most``."""
    return torch.where(lengths > most, most / lengths, 1.0)


def _usual(lengths: Tensor) -> Tensor:
    """Return the median over the clients, the last dimension."""
    return lengths.quantile(0.5, dim=-1, keepdim=True)


def _reasons(lengths: Tensor, shares: Tensor, names: Sequence[str], limit: float) -> dict[int, str]:
    """Return the clients whose whole update, or that of a tensor, is far longer than is taken, with the reason."""
    whole = lengths.norm(dim=0)
    usual = float(_usual(whole))
    least, tensors = shares.min(0)
    reasons = {}
    for place, (length, share) in enumerate(zip(whole.tolist(), least.tolist(), strict=True)):
        if length > max(2 * limit, 1) * usual:
            reasons[place] = (
                f"its update is {length / usual:.3g} times as long as the median; {limit:g} times is taken"
                if usual
                else "most clients changed nothing, so no update is taken"
            )
        elif share < 1 / UNEVEN:
            name = names[int(tensors[place])]
            reasons[place] = f"its update of {name} is over {UNEVEN:g} times as long as is taken"
    return reasons


def krum(updates: Tensor, settings: AttackerShare) -> Combined:
    """Average without the updates farthest from their neighbours: Multi-Krum (Blanchard et al., 2017).

    To leave out f clients, it needs at least 2 f + 3; it leaves out fewer if there are fewer.
    """
    count = len(updates)
    out = max(0, min(math.ceil(settings.attackers * count - 1e-9), (count - 3) // 2))
    distances = torch.cdist(updates, updates).square()
    neighbours = distances.sort(dim=1).values[:, 1 : max(2, count - out - 1)]
    order = neighbours.sum(1).argsort()
    chosen = order[: count - out]
    left_out = order[count - out :].tolist()
    why = f"its update is farthest from its neighbours'; {out} of {count} are left out"
    return Combined(updates[chosen.sort().values].mean(0), dict.fromkeys(left_out, why))


def _without_ends(updates: Tensor, ends: int) -> Combined:
    """Average each value without its ``ends`` smallest and largest; report clients far from the result."""
    count = len(updates)
    ends = min(ends, (count - 1) // 2)
    result = updates.sort(dim=0).values[ends : count - ends].mean(0)
    distances = (updates - result).norm(dim=1)
    times = distances / distances.quantile(0.5).clamp(min=torch.finfo(distances.dtype).tiny)
    return Combined(
        result,
        {
            place: f"its update lies {far:.3g} times as far from the result as the median client's"
            for place, far in enumerate(times.tolist())
            if far > FAR
        },
    )
