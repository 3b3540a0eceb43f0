"""Limit what one client's features can do to the top and the queue, and so to all clients.

Every split method uses it. There are three limits (``robust.features``, ``robust.class_share``), each
relative to the fleet, because usual values change while a model learns:

- the length of a feature vector;
- how often the class of a client's student features differs from that of its teacher features: a
  client that presents one class as another cannot hide this for more than a few images;
- one client's share of a class's positive keys.

Shapes are fixed, and no value on the device decides what runs (`Hardware.make_step`).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from semisfl.fleet.base import Features, HeldBack
from semisfl.methods.base import Setup
from semisfl.settings.robust import FEWEST

LONGEST = 2.0
"""Longest feature vector that is used, in median lengths: honest clients differ by less than that."""
LEAST_AGREEMENT = 0.5
"""A client is ignored if its features agree on the class less often than this times the median client's."""
DOUBT = 2.0
"""Standard deviations by which its agreement must be below that limit: the few confident labels of an honest
client may all differ by chance."""
NO_LABEL = -1
"""The label of rows that are not used: no confident key has it, so such an anchor has no positives."""


class Influence:
    """Limits on the features of one round, and the counts that its report is made of.

    Without ``robust.features = limited``, and in steps of fewer than `FEWEST` clients, everything is
    returned unchanged.
    """

    def __init__(self, setup: Setup) -> None:
        """Take the limits of ``config.robust`` and make the counts, one per active client."""
        config, device = setup.config, setup.hardware.device
        self.settings, self.classes = config.robust, setup.classes
        self.on = self.settings.features == "limited"
        # By position among the active clients, over the round's steps.
        clients = config.clients.active
        self._agreed, self._kept, self._long, self._unused = torch.zeros(4, clients, device=device)
        self._steps = torch.zeros((), device=device)

    def start_round(self) -> None:
        """Forget the counts of the round before."""
        for sums in (self._agreed, self._kept, self._long, self._unused, self._steps):
            sums.zero_()

    def _limits(self, features: Features) -> bool:
        """Return whether there are limits in this step: they compare at least `FEWEST` clients."""
        return self.on and len(features.clients) >= FEWEST

    def limit_features(self, features: Features, active: Sequence[int]) -> Features:
        """Return the features with vectors longer than `LONGEST` medians shortened to that length.

        The student's rows are a new leaf that requires a gradient. ``active``: all clients of the round.
        """
        if not self._limits(features):
            return features
        student, too_long = self._shorten(features.student.detach(), features)
        teacher, _ = self._shorten(features.teacher, features)
        self._long.index_add_(0, self._places(features, active), too_long)
        return replace(features, student=student.requires_grad_(), teacher=teacher)

    def _shorten(self, rows: Tensor, features: Features) -> tuple[Tensor, Tensor]:
        """Shorten long rows; also return the share of each client's rows that was too long."""
        lengths = rows.float().norm(dim=1)
        most = LONGEST * _median(lengths.view(len(features.clients), -1).mean(1))
        factors = (most / lengths.clamp(min=torch.finfo(torch.float32).tiny)).clamp(max=1)
        too_long = (factors < 1).float().view(len(features.clients), -1).mean(1)
        return rows * factors.to(rows.dtype).unsqueeze(1), too_long

    @torch.no_grad()
    def usable_labels(
        self,
        features: Features,
        active: Sequence[int],
        logits: Tensor,
        labels: Tensor,
        confident: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the labels [rows] and which of them are used [rows], as ``confident``.

        ``logits`` [rows, classes] are the student's. ``labels`` and ``confident`` [rows] are the teacher's; the
        latter is bool, or a weight from 0 to 1 for each label.
        All rows of a client that agrees too seldom so far get `NO_LABEL` and are unused.
        """
        if not self._limits(features):
            return labels, confident
        places, clients = self._places(features, active), len(features.clients)
        agreed = (logits.argmax(1) == labels) * confident
        self._agreed.index_add_(0, places, agreed.view(clients, -1).sum(1).float())
        self._kept.index_add_(0, places, confident.view(clients, -1).sum(1).float())
        labelled = self._kept.index_select(0, places)
        seen, labelled = labelled > 0, labelled.clamp(min=1)
        rates = self._agreed.index_select(0, places) / labelled
        # A client without a confident label so far has no rate; the median is over the others.
        least = LEAST_AGREEMENT * _median(rates, seen)
        chance = (least * (1 - least) / labelled).sqrt()
        unused = seen & (rates < least - DOUBT * chance)
        self._unused.index_add_(0, places, unused.float())
        self._steps.add_(1)
        rows = unused.repeat_interleave(features.batch)
        return labels.masked_fill(rows, NO_LABEL), confident * ~rows

    @torch.no_grad()
    def as_positives(self, features: Features, labels: Tensor, confident: Tensor) -> Tensor:
        """Return which keys may be positives, bool [rows]: of each class at most a share of one client's keys."""
        share = self.settings.class_share
        if share == 1 or not self._limits(features):
            return confident
        used = F.one_hot(labels.clamp(min=0), self.classes) * confident.unsqueeze(1)
        by_client = used.view(len(features.clients), features.batch, -1)
        counts = by_client.sum(1)
        allowed = ((counts.sum(0) - counts) * (share / (1 - share))).clamp(min=1)
        rank = by_client.cumsum(1)
        within = (rank <= allowed.unsqueeze(1)) & (by_client > 0)
        return within.any(2).reshape(-1)

    def report(self, active: Sequence[int], held_back: HeldBack) -> None:
        """Report the clients that were held back in the round. Reads from the device."""
        if not self.on:
            return
        steps = max(1.0, float(self._steps))
        rates = (self._agreed / self._kept.clamp(min=1)).tolist()
        for place, client in enumerate(active):
            long, unused = float(self._long[place]) / steps, float(self._unused[place])
            if long > 0.5:
                held_back.add(
                    client,
                    f"{long:.0%} of its features are longer than {LONGEST:g} times the median",
                )
            if unused:
                held_back.add(
                    client,
                    f"its features are unused in {unused:.0f} of {steps:.0f} steps: student and teacher "
                    f"ones agree on {rates[place]:.0%} of classes",
                )

    def _places(self, features: Features, active: Sequence[int]) -> Tensor:
        device = self._kept.device
        if features.clients == tuple(active):
            return torch.arange(len(active), device=device)
        return torch.tensor([active.index(client) for client in features.clients], device=device)


def _median(values: Tensor, there: Tensor | None = None) -> Tensor:
    """Return the median, the mean of the middle two of an even count; infinite if there are no values.

    `Tensor.nanmedian` takes the lower of the two, and `Tensor.nanquantile` waits for the device.
    """
    there = torch.ones_like(values, dtype=torch.bool) if there is None else there
    count = there.sum()
    middle = torch.stack([count - 1, count]).clamp(min=0) // 2
    ordered = torch.where(there, values, torch.inf).sort().values
    return ordered.index_select(0, middle).mean()
