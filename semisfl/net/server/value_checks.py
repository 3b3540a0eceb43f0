"""Check the values that devices send: finite, and in fixed ranges. Name the device whose values stand out.

`robust.aggregate` and `robust.features` bound what possible values can do to the model. A round that leaves losses or
weights that are not finite is undone, and repeated once without the device that stood out.
"""

import logging
import math
import statistics
from collections.abc import Mapping

import torch
from torch import Tensor

from semisfl.fleet.base import State
from semisfl.settings.config import Config
from semisfl.settings.robust import FEWEST

MOST = 1e6
"""Largest magnitude of a feature, weight, gradient or statistic; of a working model none is anywhere near."""
MOST_COUNTED = 2**53
"""Largest value of a counter: up to here the mean of counters, taken in doubles, is exact."""
SMALLEST = 1e-12
"""Least size that others are compared with."""
STANDS_OUT = 3.0
"""A device stands out whose features or update are this many times as large as the median of the others."""


def impossible(tensors: Mapping[str, Tensor]) -> str | None:
    """Return which tensor has a value that is not finite or outside its range, and why; None if none has."""
    for name, tensor in tensors.items():
        if not tensor.numel():
            continue
        low, high = (value.item() for value in tensor.aminmax())
        most = MOST if tensor.is_floating_point() else MOST_COUNTED
        least = 0.0 if name.endswith(("running_var", "num_batches_tracked")) else -most
        # Comparisons with NaN are false, so this refuses NaN too.
        if not (low >= least and high <= most):
            return f"{name} has values from {low:g} to {high:g}; {least:g} to {most:g} are possible"
    return None


def largest(tensor: Tensor) -> float:
    """Return the largest magnitude in ``tensor``."""
    return float(tensor.abs().max())


def update_size(state: State, sent: State) -> float:
    """Return the distance between the weights of ``state`` and those that were ``sent``, without statistics."""
    moved = [
        (state[name] - value.to(state[name].device)).float().norm()
        for name, value in sent.items()
        if value.is_floating_point() and not name.endswith(("running_mean", "running_var"))
    ]
    return float(torch.stack(moved).norm())


def stands_out(sizes: Mapping[str, Mapping[int, float]]) -> int | None:
    """Return the client whose values are largest, relative to the median of the others; None if none stands out.

    ``sizes``: kind of values ("features", "update") -> client -> size.
    """
    most, worst = STANDS_OUT, None
    for of_clients in sizes.values():
        for client, size in of_clients.items():
            others = [other for one, other in of_clients.items() if one != client]
            usual = statistics.median(others) if others else math.inf
            if size > most * usual:
                most, worst = size / max(usual, SMALLEST), client
    return worst


def limits_on_one_client(config: Config) -> tuple[int, str]:
    """Return a log level and a line that says what one device can do to the run."""
    active, robust = config.clients.active, config.robust
    rules = f"robust.aggregate = {robust.aggregate}, robust.features = {robust.features}"
    if active < FEWEST:
        return logging.WARNING, (
            f"clients.active = {active}: a single device can ruin the run; limits need {FEWEST}"
        )
    if robust.aggregate == "mean" or robust.features == "as_sent":
        return logging.WARNING, f"{rules}: a single device can ruin the run; the defaults limit it"
    limited = f"each device's influence is limited: {rules}"
    if (quorum := config.network.quorum) < FEWEST:
        limited += (
            f"; not in a round of fewer than {FEWEST} devices, which network.quorum = {quorum} allows: "
            f"set network.quorum={FEWEST} to wait for more"
        )
    return logging.INFO, limited
