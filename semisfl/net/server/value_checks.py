"""Check the values that clients send, and find clients whose values stand out.

Impossible values are refused frame by frame. Possible values are compared with those of the other
clients: a *size* is the largest magnitude in a part of an answer (one kind of features, a state's
weights, its statistics), and the yardstick is the median over the clients that answered. With one or
two clients the median says nothing, so the yardstick is the size in the last good round.
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
"""Times the yardstick: the possible cause if the round diverges."""
SMALLEST = {"weights": 0.01, "values": 1.0}
"""Yardsticks are at least this: where all features (or gradients, or statistics) are nearly zero,
one that is not does no harm. Weights never are."""

Ranges = Mapping[str, tuple[float, float]]
Sizes = dict[str, float]


def ranges(tensors: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Return the minimum and maximum of every tensor that is not empty; NaN if it holds NaN."""
    extremes = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            low, high = tensor.aminmax()
            extremes[name] = (low.item(), high.item())
    return extremes


def unbelievable(tensors: Mapping[str, Tensor], extremes: Ranges) -> str | None:
    """Return what is wrong with a client's values, or None."""
    for name, (low, high) in extremes.items():
        most = ABSURD if tensors[name].is_floating_point() else MOST_COUNTED
        # Comparisons with NaN are false, so this catches NaN too.
        if not (low >= -most and high <= most):
            return f"{name} runs from {low:g} to {high:g}; at most {most:g} either way is believed"
        if name.endswith(("running_var", "num_batches_tracked")) and low < 0:
            return f"{name} goes down to {low:g}; it cannot be negative"
    return None


def sizes(extremes: Ranges) -> Sizes:
    """Return the size of every part: each kind of features; each state's weights and statistics."""
    parts: Sizes = {}
    for name, (low, high) in extremes.items():
        if name.endswith("num_batches_tracked"):
            continue
        part, slash, _ = name.partition("/")
        if slash:
            part += " statistics" if name.endswith(("running_mean", "running_var")) else " weights"
        size = max(-low, high)
        parts[part] = max(parts.get(part, 0.0), size if size == size else math.inf)
    return parts


class Screen:
    """Compare the clients of a round with each other, and the rounds of a run."""

    def __init__(self) -> None:
        self.strained = False
        """Whether the server sent or accepted unusual values in this round. Later answers may then be
        absurd without any fault of the client."""
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
        """Note the sizes of what the server sends; return whether they are far from usual."""
        ratios = [_ratio(part, size, self._usual.get(part)) for part, size in parts.items()]
        self._latest |= parts
        self.strained |= any(ratio >= SUSPECT for ratio in ratios)
        return any(ratio >= OUTLIER for ratio in ratios)

    def takes(self, client: int, parts: Sizes) -> None:
        for part, size in parts.items():
            self._step.setdefault(part, {})[client] = size

    def outliers(self) -> dict[int, str]:
        """Return the clients noted since the last call whose values must not be used, with the reason."""
        reasons: dict[int, str] = {}
        for part, by_client in self._step.items():
            median = statistics.median_low(by_client.values())
            yardstick = median if len(by_client) > 2 else self._usual.get(part)
            for client, size in by_client.items():
                ratio = _ratio(part, size, yardstick if yardstick else min(by_client.values()))
                if ratio >= OUTLIER and yardstick is not None:
                    reasons[client] = (
                        f"{part} reaches {size:g} where {yardstick:g} is usual; "
                        f"at most {OUTLIER:g} times that is used"
                    )
                else:
                    self._ratios[client] = max(ratio, self._ratios.get(client, 0.0))
                    self.strained |= ratio >= SUSPECT
            self._latest[part] = median
        self._step.clear()
        return reasons

    def suspect(self, others: Collection[int]) -> int | None:
        """Return the most suspicious client of this round that is not in ``others``, or None."""
        ratios = {client: r for client, r in self._ratios.items() if client not in others}
        worst = max(ratios, key=ratios.__getitem__, default=None)
        return worst if worst is not None and ratios[worst] >= SUSPECT else None

    def remember(self) -> None:
        """Take the sizes of a good round as the usual ones."""
        self._usual |= self._latest


def _ratio(part: str, size: float, yardstick: float | None) -> float:
    if yardstick is None and part.endswith("weights"):
        return 1.0  # the first weights of a run: what is usual is not known yet
    kind = "weights" if part.endswith("weights") else "values"
    return size / max(yardstick or 0.0, SMALLEST[kind])
