"""Check the values that clients send, and find clients whose values stand out.

Values that cannot be are refused one frame at a time. Values that could be, but are far from
everybody else's, are found by comparison: a *size* is the largest magnitude in a part of an answer
(one kind of features, a state's weights, its statistics), and the yardstick is the median of the
clients who answered. Of one or two clients nobody is outvoted; then what was usual in the last good
round is the yardstick.
"""

import math
import statistics
from collections.abc import Collection, Mapping

from torch import Tensor

ABSURD = 1e6
"""No feature, weight or statistic of a working model is anywhere near this large."""
MOST_COUNTED = 2**53
"""The most a counter may say: up to here a mean of counters, taken in doubles, is exact."""
OUTLIER = 10.0
"""Times the yardstick: left out at once, before anything is computed with it."""
SUSPECT = 3.0
"""Times the yardstick: may have been what blew a round up, if one did."""
SMALLEST = {"weights": 0.01, "values": 1.0}
"""Yardsticks are at least this: where all features (or gradients, or statistics) are nearly zero,
one that is not does no harm. Weights never are."""

Ranges = Mapping[str, tuple[float, float]]
Sizes = dict[str, float]


def ranges(tensors: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
    """The least and the greatest value of every tensor that has any; NaN if one is NaN."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            low, high = tensor.aminmax()
            found[name] = (low.item(), high.item())
    return found


def unbelievable(tensors: Mapping[str, Tensor], found: Ranges) -> str | None:
    """Return what is wrong with a client's values, or None."""
    for name, (low, high) in found.items():
        most = ABSURD if tensors[name].is_floating_point() else MOST_COUNTED
        # Comparisons with NaN are false, so this catches NaN too.
        if not (low >= -most and high <= most):
            return f"{name} runs from {low:g} to {high:g}; at most {most:g} either way is believed"
        if name.endswith(("running_var", "num_batches_tracked")) and low < 0:
            return f"{name} goes down to {low:g}; it cannot be negative"
    return None


def sizes(found: Ranges) -> Sizes:
    """The size of every part: features by kind; of each state its weights, and its statistics."""
    parts: Sizes = {}
    for name, (low, high) in found.items():
        if name.endswith("num_batches_tracked"):
            continue
        part, slash, _ = name.partition("/")
        if slash:
            part += " statistics" if name.endswith(("running_mean", "running_var")) else " weights"
        size = max(-low, high)
        parts[part] = max(parts.get(part, 0.0), size if size == size else math.inf)
    return parts


class Screen:
    """Compares the clients of a round with each other, and the rounds of a run."""

    def __init__(self) -> None:
        self.strained = False
        """Something unusual was sent out, or taken in, this round: what clients answer from there
        on may be absurd without any fault of theirs."""
        self._usual: Sizes = {}
        self._latest: Sizes = {}
        self._step: dict[str, dict[int, float]] = {}
        self._ratios: dict[int, float] = {}

    def start_round(self) -> None:
        self.strained = False
        self._latest.clear()
        self._step.clear()
        self._ratios.clear()

    def sends(self, parts: Sizes) -> bool:
        """Note the sizes of what the server sends out; whether they are far from usual."""
        ratios = [_ratio(part, size, self._usual.get(part)) for part, size in parts.items()]
        self._latest |= parts
        self.strained |= any(ratio >= SUSPECT for ratio in ratios)
        return any(ratio >= OUTLIER for ratio in ratios)

    def takes(self, client: int, parts: Sizes) -> None:
        for part, size in parts.items():
            self._step.setdefault(part, {})[client] = size

    def outliers(self) -> dict[int, str]:
        """Who of those noted since the last call must not be used, and why."""
        found: dict[int, str] = {}
        for part, by_client in self._step.items():
            median = statistics.median_low(by_client.values())
            yardstick = median if len(by_client) > 2 else self._usual.get(part)
            for client, size in by_client.items():
                ratio = _ratio(part, size, yardstick if yardstick else min(by_client.values()))
                if ratio >= OUTLIER and yardstick is not None:
                    found[client] = (
                        f"{part} reaches {size:g} where {yardstick:g} is usual; "
                        f"at most {OUTLIER:g} times that is used"
                    )
                else:
                    self._ratios[client] = max(ratio, self._ratios.get(client, 0.0))
                    self.strained |= ratio >= SUSPECT
            self._latest[part] = median
        self._step.clear()
        return found

    def suspect(self, others: Collection[int]) -> int | None:
        """Who stood out most in this round of those not in ``others``; None: nobody did."""
        ratios = {client: r for client, r in self._ratios.items() if client not in others}
        worst = max(ratios, key=ratios.__getitem__, default=None)
        return worst if worst is not None and ratios[worst] >= SUSPECT else None

    def remember(self) -> None:
        """The round was good: its sizes are what is usual."""
        self._usual |= self._latest


def _ratio(part: str, size: float, yardstick: float | None) -> float:
    if yardstick is None and part.endswith("weights"):
        return 1.0  # the first weights of a run: what is usual is not known yet
    kind = "weights" if part.endswith("weights") else "values"
    return size / max(yardstick or 0.0, SMALLEST[kind])
