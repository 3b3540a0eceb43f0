"""Pseudo-labels corrected for the classes that each client holds (`semisfl.align`; beyond the paper).

With q the teacher's prediction, pi_s the class mix of the labelled images and pi_i the estimated mix of
client i:

- ``client``: q' ~ q pi_i / pi, with pi the mean of pi_i over all clients seen so far. The estimate pi_i
  is the moving mean of q' itself, one step of expectation maximisation per batch (Saerens et al., 2002).
  Saerens et al. divide by pi_s. But a class that the teacher sees too often in every client is the
  teacher's mistake, which each step would then enlarge. If all clients are alike, nothing is corrected.
- ``global``: q' ~ q pi_s / p, with p the moving mean of q over all clients.

Everything is updated in place, and no value on the device decides what runs (`Hardware.make_step`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from semisfl.algorithm.losses import most_likely
from semisfl.algorithm.membership import Membership
from semisfl.settings.sections import Confidence, needed_confidence

DECAY = 0.999
"""Per step, of the mean over all clients: about the last 1,000 steps count."""
CLIENT_DECAY = 0.98
"""Per step, of the mean over one client: about the last 50 of its steps count."""
WARMUP_ROUNDS = 10
"""First rounds with clients, in which labels are not corrected: the first predictions say little about a client."""
SMOOTHING = 0.1
"""Share of pi in a client's estimated mix, so that no class is ever ruled out."""
SMALLEST = torch.finfo(torch.float32).tiny
"""Least share to divide by: a softmax of logits that are far apart is exactly 0 for some classes."""


class Labelling:
    """Give pseudo-labels, corrected for class mixes if ``align`` asks for it.

    Its state: the moving mean of all predictions, and per client an estimated class mix with the number
    of steps behind it. With ``align = none`` there is no state, and the labels are the plain ones.
    """

    def __init__(
        self,
        align: str,
        threshold: Confidence,
        rule: str,
        prior: Tensor,
        clients: int,
        active: int,
    ) -> None:
        """Take everything that stays the same over a run.

        ``align``: ``none``, ``global`` or ``client``. ``threshold``: the confidence tau, a number or
        ``by_classes``. ``rule``: ``>=`` or ``>``. ``prior`` [classes]: pi_s, the class mix of the labelled
        images. ``clients``: N, the number of clients of the run. ``active``: the largest number of clients
        in a round.
        """
        self.align, self.rule = align, rule
        self.threshold = needed_confidence(threshold, len(prior))
        self.prior = prior / prior.sum()
        self._means = {
            "steps": prior.new_zeros(()),
            "classes": torch.full_like(self.prior, 1 / len(prior)),
            "client_steps": prior.new_zeros(clients),
            "client_mix": self.prior.repeat(clients, 1),
        }
        self._membership = Membership()
        self._warm = prior.new_zeros(())
        self._clients = torch.zeros(active, dtype=torch.long, device=prior.device)

    def start_round(self, before: int, active: Sequence[int], members: Mapping[int, str]) -> None:
        """Begin a round, after ``before`` earlier ones with clients.

        Forget the estimated mix of clients that are no longer ``members`` (`Fleet.members`).
        """
        self._warm.fill_(float(before >= WARMUP_ROUNDS))
        self._clients[: len(active)].copy_(torch.tensor(active))
        steps, mix = self._means["client_steps"], self._means["client_mix"]
        if gone := sorted(self._membership.gone(range(len(steps)), members)):
            steps[gone], mix[gone] = 0.0, self.prior

    @torch.no_grad()
    def label(
        self, logits: Tensor, clients: Sequence[int], active: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Return the labels [rows] and whether each is confident, as bool [rows].

        ``logits`` [rows, classes] are those of whoever labels. The rows belong to ``clients`` in equal
        shares and in this order; ``active`` are all clients of the round.
        """
        probabilities = logits.float().softmax(1)
        if self.align != "none":
            probabilities = self._correct(probabilities, self._places(clients, active))
        return most_likely(probabilities, self.threshold, self.rule)

    def _places(self, clients: Sequence[int], active: Sequence[int]) -> Tensor:
        if tuple(clients) == tuple(active):
            return self._clients[: len(active)]
        return torch.tensor(clients, device=self._clients.device)

    def _correct(self, raw: Tensor, places: Tensor) -> Tensor:
        """Return q' of every row, and move the means by what this step shows."""
        means = self._means
        if self.align == "global":
            corrected = self._reweight(raw, self.prior / means["classes"].clamp(min=SMALLEST))
            weight = _weight(means["steps"].add_(1), DECAY)
            means["classes"].lerp_(raw.mean(0), weight)
            return corrected
        mix, usual = means["client_mix"].index_select(0, places), self._usual_mix()
        smoothed = mix.lerp(usual.expand_as(mix), SMOOTHING)
        ratio = (smoothed / usual).repeat_interleave(len(raw) // len(places), 0)
        corrected = self._reweight(raw, ratio)
        steps = means["client_steps"].index_select(0, places) + 1
        means["client_steps"].index_copy_(0, places, steps)
        seen_mix = corrected.view(len(places), -1, raw.shape[1]).mean(1)
        moved = mix.lerp(seen_mix, _weight(steps, CLIENT_DECAY).unsqueeze(1).expand_as(seen_mix))
        means["client_mix"].index_copy_(0, places, moved)
        return corrected

    def _usual_mix(self) -> Tensor:
        """Return the mean mix of the clients seen so far; pi_s before the first."""
        seen = self._means["client_steps"] > 0
        total = (self._means["client_mix"] * seen.unsqueeze(1)).sum(0)
        mean = torch.where(seen.any(), total / seen.sum().clamp(min=1), self.prior)
        return mean.clamp(min=SMALLEST)

    def _reweight(self, probabilities: Tensor, ratio: Tensor) -> Tensor:
        """Return predictions times ``ratio``, normalised to sum 1; unchanged before the warm-up is over."""
        weighted = probabilities * ratio.pow(self._warm)
        return weighted / weighted.sum(1, keepdim=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the moving means of predictions; empty where labels are not corrected."""
        if self.align == "none":
            return {}
        return {**self._means, "names": self._membership.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the moving means of a checkpoint."""
        if self.align == "none":
            return
        self._membership.load_state_dict(state["names"])
        for name, mean in self._means.items():
            before = state[name]
            if name.startswith("client_"):  # a resumed run may have another number of clients
                mean, before = mean[: len(before)], before[: len(mean)]
            mean.copy_(before)


def _weight(steps: Tensor, decay: float) -> Tensor:
    """Return 1 - decay, and more in the first steps, so that a mean's start does not count."""
    return (1 / steps).clamp(min=1 - decay)
