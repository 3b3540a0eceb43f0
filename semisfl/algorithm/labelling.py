"""Pseudo-labels that adapt to who sends the images: thresholds, class mixes, and what lies below.

Beyond the paper, and off unless set (`LabelSettings`; docs/methods.md has the equations). With q the
teacher's prediction, pi_s the labelled images' class mix and pi_i what client i's is estimated to be:

- *align* corrects q for a mix it was not trained on, q' ~ q pi_i / pi_s. The estimate is the moving mean
  of q' itself, one step of expectation maximisation per batch (Saerens et al., 2002).
- *threshold* follows moving means of confidences, of everybody or of a client, and of predicted classes
  (FreeMatch, Wang et al., 2023), or how many of a client's labels of a class reach tau (FlexMatch, Zhang
  et al., 2021); *energy* is asked for besides (InPL, Yu et al., 2023).
- *below* weights the rest by a Gaussian (SoftMatch, Chen et al., 2023) or learns q' itself from it.
- *adjust* adds log(pi_i / pi_s) to the student's logits, so that a client with few classes does not teach
  its bottom to see them everywhere (Menon et al., 2021; Zhang et al., 2022).

Everything is updated in place and without host decisions, so a step that labels can be captured.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from semisfl.algorithm.losses import consistency, pseudo_label
from semisfl.settings.pseudo_labels import LabelSettings


class Labels(NamedTuple):
    """Of one step's rows."""

    labels: Tensor
    confident: Tensor
    probabilities: Tensor | None = None
    """q'; with the next two only where labels adapt."""
    confidence: Tensor | None = None
    threshold: Tensor | None = None
    shift: Tensor | None = None
    """log(pi_i / pi_s) of each row's client, where logits are adjusted by it."""


class Labelling:
    def __init__(
        self,
        settings: LabelSettings,
        threshold: float,
        rule: str,
        prior: Tensor,
        clients: int,
        active: int,
    ) -> None:
        """``prior``: pi_s; ``clients``: N; ``active``: the most that take part in a round."""
        self.settings, self.threshold, self.rule = settings, threshold, rule
        self.prior = prior / prior.sum()
        classes = len(prior)
        fresh, new = 1 / classes, prior.new_full
        self._means = {
            "steps": prior.new_zeros(()),
            "confidence": new((), fresh),
            "variance": prior.new_ones(()),
            "classes": new((classes,), fresh),
            "client_steps": prior.new_zeros(clients),
            "client_confidence": new((clients,), fresh),
            "client_mix": self.prior.repeat(clients, 1),
            "client_share": prior.new_zeros(clients, classes),
        }
        self._warm = prior.new_zeros(())
        self._clients = torch.zeros(active, dtype=torch.long, device=prior.device)

    def start_round(self, round_index: int, active: Sequence[int]) -> None:
        self._warm.fill_(float(round_index >= self.settings.warmup))
        self._clients[: len(active)].copy_(torch.tensor(active))

    @torch.no_grad()
    def label(self, logits: Tensor, clients: Sequence[int], active: Sequence[int]) -> Labels:
        """Labels of rows that are ``clients``' in equal shares; these are all ``active`` or some of them."""
        if not self.settings.adapts:
            return Labels(*pseudo_label(logits, self.threshold, self.rule))
        raw = logits.float().softmax(1)
        places = self._places(clients, active)
        owner = places.repeat_interleave(len(raw) // len(clients))
        posterior = self._reweighted(raw, self._mix(owner) / self.prior)
        if self.settings.align == "client":
            given = posterior
        elif self.settings.align == "global":
            given = self._reweighted(raw, self.prior / self._means["classes"])
        else:
            given = raw
        confidence, labels = given.max(1)
        self._observe(raw, posterior, confidence, labels, places)
        threshold = self._thresholds(labels, owner)
        reached = self._reaches(confidence, threshold) & self._settled(logits)
        shift = self._shift(owner) if self.settings.adjust else None
        return Labels(labels, reached, given, confidence, threshold, shift)

    def loss(self, logits: Tensor, given: Labels, labels: Tensor, confident: Tensor) -> Tensor:
        """H of Eq. (1) with labels ``given``, as far as ``labels`` and ``confident`` still stand."""
        settings = self.settings
        if not settings.adapts:
            return consistency(logits, labels, confident)
        assert given.probabilities is not None and given.confidence is not None
        assert given.threshold is not None
        if given.shift is not None:
            logits = logits.float() + settings.adjust * given.shift
        if settings.below == "unused":
            return consistency(logits, labels, confident)
        # A row whose label was taken away has -1, and no part in either sum.
        rest = settings.below_weight * self._warm * (~confident & (labels >= 0))
        if settings.below == "gaussian":
            under = (given.threshold - given.confidence).clamp(min=0)
            tail = torch.exp(-under.square() / (2 * self._means["variance"]).clamp(min=1e-6))
            return consistency(logits, labels, confident + rest * tail)
        soft = F.cross_entropy(logits.float(), given.probabilities, reduction="none")
        return consistency(logits, labels, confident) + (soft * rest).mean()

    def _reaches(self, confidence: Tensor, threshold: Tensor | float) -> Tensor:
        return confidence >= threshold if self.rule == ">=" else confidence > threshold

    def _settled(self, logits: Tensor) -> Tensor:
        """Whether the free energy is low enough, once it is warm."""
        if self.settings.energy is None:
            return torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        energy = -logits.float().logsumexp(1)
        return (energy <= self.settings.energy) | (self._warm == 0)

    def _places(self, clients: Sequence[int], active: Sequence[int]) -> Tensor:
        if tuple(clients) == tuple(active):
            return self._clients[: len(active)]
        return torch.tensor(clients, device=self._clients.device)

    def _mix(self, owner: Tensor) -> Tensor:
        """pi_i of each row's client."""
        mix = self._means["client_mix"].index_select(0, owner)
        return mix.lerp(self.prior.expand_as(mix), self.settings.smoothing)

    def _shift(self, owner: Tensor) -> Tensor:
        return self._warm * torch.log(self._mix(owner) / self.prior)

    def _reweighted(self, probabilities: Tensor, ratio: Tensor) -> Tensor:
        """Predictions times ``ratio``, once it is warm."""
        weighted = probabilities * ratio.pow(self._warm)
        return weighted / weighted.sum(1, keepdim=True)

    def _observe(
        self, raw: Tensor, posterior: Tensor, confidence: Tensor, labels: Tensor, places: Tensor
    ) -> None:
        """Move every mean; the first observation is taken as it is."""
        means, settings = self._means, self.settings
        weight = _weight(means["steps"].add_(1), settings.decay)
        means["confidence"].lerp_(confidence.mean(), weight)
        means["variance"].lerp_(confidence.var(correction=0), weight)
        means["classes"].lerp_(raw.mean(0), weight)
        own_steps = means["client_steps"].index_select(0, places) + 1
        means["client_steps"].index_copy_(0, places, own_steps)
        own = _weight(own_steps, settings.client_decay)
        clients, classes = len(places), posterior.shape[1]
        sure = F.one_hot(labels, classes) * self._reaches(confidence, self.threshold).unsqueeze(1)
        by_client = {
            "client_confidence": confidence.view(clients, -1).mean(1),
            "client_mix": posterior.view(clients, -1, posterior.shape[1]).mean(1),
            "client_share": sure.float().view(clients, -1, classes).mean(1),
        }
        for name, now in by_client.items():
            before = means[name].index_select(0, places)
            moved = before.lerp(now, own.view(-1, *[1] * (now.dim() - 1)).expand_as(now))
            means[name].index_copy_(0, places, moved)

    def _thresholds(self, labels: Tensor, owner: Tensor) -> Tensor:
        """tau of each row."""
        kind, means = self.settings.threshold, self._means
        if kind == "fixed":
            return torch.full_like(owner, self.threshold, dtype=torch.float32)
        if kind == "client_share":
            level = self._shares().index_select(0, owner).gather(1, labels.unsqueeze(1)).squeeze(1)
        elif kind.startswith("client"):
            level = means["client_confidence"].index_select(0, owner)
        else:
            level = means["confidence"].expand(len(owner))
        if kind.endswith("class"):
            level = level * (means["classes"] / means["classes"].max()).index_select(0, labels)
        least = min(self.settings.least, self.threshold)
        return torch.where(self._warm > 0, level.clamp(least, self.threshold), self.threshold)

    def _shares(self) -> Tensor:
        """tau b / (2 - b) of each client and class, b the class's part of what reaches tau, held against the
        largest such part or, while that is more, against what does not reach it."""
        share = self._means["client_share"]
        most = torch.maximum(share.amax(1), 1 - share.sum(1)).clamp(min=1e-6)
        part = share / most.unsqueeze(1)
        return self.threshold * part / (2 - part)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._means) if self.settings.adapts else {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, mean in self.state_dict().items():
            mean.copy_(state[name])


def _weight(steps: Tensor, decay: float) -> Tensor:
    """1 - decay, and more of it in the first steps, so that a mean's start does not count."""
    return (1 / steps).clamp(min=1 - decay)
