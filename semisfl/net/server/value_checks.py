"""Check the values that clients send, and find clients whose values stand out.

Impossible values are refused frame by frame. The sizes of possible values are compared with those of
the other clients. A *size* is the largest magnitude in a part of an answer (one kind of features, a
state's weights, its statistics), or how far a client moved the weights it received. The yardstick is the
median over the clients that answered. With one or two clients the median says nothing, so the yardstick
is what was usual in good rounds, which it follows slowly. Two clients that are far from each other teach it
nothing. Features of two are unusual only if they are also far above the other client's.
"""

import math
import statistics
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from semisfl.fleet.base import State
from semisfl.fleet.yardstick import followed

ABSURD = 1e6
"""No feature, weight or statistic of a working model is anywhere near this large."""
MOST_COUNTED = 2**53
"""The most a counter may say: up to here a mean of counters, taken in doubles, is exact."""
MOST_STEPS = 2**31
"""The most by which a counter moves in a round. A limit on its value alone would shut out honest clients once
somebody has brought the mean close to it."""
OUTLIER = 10.0
"""Times the yardstick: left out at once, before anything is computed with it."""
SUSPECT = 3.0
"""Times the yardstick: the possible cause if the round diverges."""
SMALLEST = {"weights": 0.01, "update": 0.05}
"""Yardsticks are at least this, those of other parts 1: where all features (or gradients, or
statistics) are nearly zero, one that is not does no harm. Weights never are. An update that changes
the weights by less than half does no harm either."""
REACH = 6.7
"""Deviations of noise that a device adds at most (`semisfl.fleet.noise`)."""
FIRST_UPDATE = 0.5
"""Yardstick of updates in the first round of one or two clients: no training moves weights by five
times their own norm."""

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


def impossible(tensors: Mapping[str, Tensor], extremes: Ranges) -> str | None:
    """Return what is wrong with a client's values, or None."""
    for name, (low, high) in extremes.items():
        most = ABSURD if tensors[name].is_floating_point() else MOST_COUNTED
        # Comparisons with NaN are false, so this catches NaN too.
        if not (low >= -most and high <= most):
            return f"{name} runs from {low:g} to {high:g}; at most {most:g} either way is believed"
        if name.endswith(("running_var", "num_batches_tracked")) and low < 0:
            return f"{name} goes down to {low:g}; it cannot be negative"
    return None


def sizes(extremes: Ranges, noise: float = 0.0) -> Sizes:
    """Return the size of every part: each kind of features; each state's weights and statistics.

    ``noise`` is the deviation of noise on features that the client announced. It may explain nine tenths
    of a size and no more: an attacker could announce any.
    """
    parts: Sizes = {}
    for name, (low, high) in extremes.items():
        if name.endswith("num_batches_tracked"):
            continue
        part, slash, _ = name.partition("/")
        if slash:
            part += " statistics" if name.endswith(("running_mean", "running_var")) else " weights"
        size = max(-low, high)
        size = size if slash else max(size - REACH * noise, size / OUTLIER)
        parts[part] = max(parts.get(part, 0.0), size if size == size else math.inf)
    return parts


def update_size(state: State, sent: State) -> float:
    """Return how far the weights of ``state`` are from those that were ``sent``, in norms of the latter."""
    names = [
        name
        for name, value in sent.items()
        if value.is_floating_point() and not name.endswith(("running_mean", "running_var"))
    ]
    moved = [(state[name] - sent[name].to(state[name].device)).float().norm() for name in names]
    norms = [sent[name].float().norm() for name in names]
    # Weights that begin at zero have no norm to compare with.
    return float(torch.stack(moved).norm()) / max(float(torch.stack(norms).norm()), 1.0)


def miscounted(state: State, sent: State) -> str | None:
    """Return which counter of ``state`` is further from what was ``sent`` than any training brings it, or None.

    One that was not sent counts from 0.
    """
    for name, after in state.items():
        if not after.is_floating_point() and after.numel():
            before = sent[name].cpu() if name in sent else 0
            moved = int((after.cpu() - before).abs().max())
            if moved > MOST_STEPS:
                return f"{name} moved by {moved}; no round moves it by over {MOST_STEPS}"
    return None


class SizeChecks:
    """Compare the sizes of a round's clients with each other and with what is usual in the run."""

    def __init__(self, *, updates_limited: bool = False) -> None:
        """Take ``updates_limited``: long updates are shortened later, so no client is left out for one."""
        self._updates_limited = updates_limited
        self._unusual_from: set[int | None] = set()
        """The clients whose unusual values were sent or accepted in this round; None: the server's own."""
        self.usual: Sizes = {}
        """The sizes in good rounds; a restarted server needs them."""
        self._latest: Sizes = {}
        self._answers: dict[str, dict[int, float]] = {}
        self._ratios: dict[str, dict[int, float]] = {}
        """The largest ratio of each client in this round: of its updates, and of other values."""

    def start_round(self) -> None:
        self._unusual_from.clear()
        self._latest.clear()
        self._answers.clear()
        self._ratios.clear()

    def is_excused(self, client: int) -> bool:
        """Return whether values of the server or of others may be why this client's are absurd."""
        return bool(self._unusual_from - {client})

    @property
    def server_is_unusual(self) -> bool:
        """Return whether what the server sent in this round is far from usual."""
        return None in self._unusual_from

    def note_sent(self, parts: Sizes) -> bool:
        """Note the sizes of what the server sends; return whether they are far from usual."""
        ratios = [_ratio(part, size, self.usual.get(part)) for part, size in parts.items()]
        self._latest |= parts
        if any(ratio >= SUSPECT for ratio in ratios):
            self._unusual_from.add(None)
        return any(ratio >= OUTLIER for ratio in ratios)

    def note_answer(self, client: int, parts: Sizes) -> None:
        """Note the sizes of an answer, which `outliers` then compares."""
        for part, size in parts.items():
            self._answers.setdefault(part, {})[client] = size

    def outliers(self) -> dict[int, str]:
        """Return the clients noted since the last call whose values must not be used, with the reason."""
        reasons: dict[int, str] = {}
        for part, by_client in self._answers.items():
            median = statistics.median_low(by_client.values())
            yardstick = median if len(by_client) > 2 else self.usual.get(part)
            if yardstick is not None and len(by_client) == 2 and _kind(part) == "values":
                # Features can grow on both at once. Refused, they would end every repetition of the round too.
                yardstick = max(yardstick, median)
            if yardstick is None and _kind(part) == "update":
                yardstick = FIRST_UPDATE
            used = self._updates_limited and _kind(part) == "update"
            for client, size in by_client.items():
                ratio = _ratio(part, size, yardstick if yardstick else min(by_client.values()))
                if ratio >= OUTLIER and yardstick is not None and not used:
                    reasons[client] = (
                        f"{part} reaches {size:g} where {yardstick:g} is usual; "
                        f"at most {OUTLIER:g} times that is used"
                    )
                else:
                    ratios = self._ratios.setdefault(_kind(part), {})
                    ratios[client] = max(ratio, ratios.get(client, 0.0))
                    if ratio >= SUSPECT:
                        self._unusual_from.add(client)
            # One of two could otherwise make the other's values unusual by tiny ones of its own.
            if len(by_client) != 2 or _ratio(part, max(by_client.values()), median) < SUSPECT:
                self._latest[part] = median
        self._answers.clear()
        return reasons

    def suspect(self, others: Collection[int]) -> int | None:
        """Return the most suspicious client of this round that is not in ``others``, or None.

        Updates come first: once one has ruined the weights, all clients have large features.
        """
        for kind in ("update", "weights", "values"):
            ratios = {c: r for c, r in self._ratios.get(kind, {}).items() if c not in others}
            worst = max(ratios, key=ratios.__getitem__, default=None)
            if worst is not None and ratios[worst] >= SUSPECT:
                return worst
        return None

    def remember(self) -> None:
        """Let what is usual follow the sizes of a good round."""
        self.usual = followed(self.usual, self._latest)


def _kind(part: str) -> str:
    word = part.rpartition(" ")[2]
    return word if word in SMALLEST else "values"


def _ratio(part: str, size: float, yardstick: float | None) -> float:
    if not size <= ABSURD:
        return math.inf
    if yardstick is None and _kind(part) == "weights":
        return 1.0  # the first weights of a run: what is usual is not known yet
    return size / max(yardstick or 0.0, SMALLEST.get(_kind(part), 1.0))
