"""(FL)² (Lee et al., NeurIPS 2024): SemiFL's round for few labels.

It adds three things to SemiFL. A client's threshold follows its own confidences, class by class. Very
confident labels must also hold at adversarial weights nearby (sharpness-aware consistency). A client
that is less sure has more weight in the mean. No images are mixed. Equations are those of
the paper; docs/methods.md lists where its code and ours differ.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semisfl.algorithm.losses import consistency, cross_entropy
from semisfl.algorithm.schedule import learning_rate
from semisfl.fleet.base import Answers, ClientResult, ClientRuntime, State, every_tensor
from semisfl.methods.base import Setup
from semisfl.methods.fl2.settings import FL2Settings
from semisfl.methods.full_model import (
    COUNTED,
    combine_results,
    count_labels,
    count_loss,
    read_counter,
    required_state,
    start_counter,
)
from semisfl.methods.semifl.method import CLIP_NORM, SemiFL
from semisfl.metrics import MethodMetrics
from semisfl.models.passes import call_with

# As in its authors' code for CIFAR-10.
RHO = 0.1
"""Radius of the adversarial weights."""
ETA = 0.01
"""Added to a weight's size, by which its part of the radius is scaled."""
PRETRAIN_ROUNDS = 10
"""Before the first round the server takes the supervised steps of this many rounds, unless
`server.pretrain_rounds` sets their number."""


class FL2(SemiFL):
    """The server's half: SemiFL's, but for a start from the labels and the weights of the mean."""

    def __init__(self, setup: Setup) -> None:
        own = setup.config.settings(FL2Settings)
        super().__init__(setup, own, FL2Work())
        server = setup.config.server
        self.pretrain_steps = 0 if server.pretrain_rounds else PRETRAIN_ROUNDS * server.steps

    def round(self, round_index: int) -> MethodMetrics:
        """Pretrain on labels before round 0, then train as SemiFL does."""
        config = self.setup.config
        if round_index == 0 and self.pretrain_steps:
            # A moving threshold would take the guesses of a model that has learnt nothing.
            lr = learning_rate(config.optimizer, 0, config.rounds)
            # As a round before the first, so that round 0 does not draw the same images and views again.
            self.supervised.run(-1, self.pretrain_steps, lr)
            first = super().round(0)
            steps = config.server.steps + self.pretrain_steps
            return replace(first, supervised_steps=steps)
        return super().round(round_index)

    def _mean(self, results: list[ClientResult]) -> State:
        """Return the learning status-aware mean, weighted by 1 - T_i; rules other than the mean use no weights."""
        if self.setup.config.robust.aggregate != "mean":
            return combine_results(self.setup, results, "model", self.model.state_dict())
        there = [result for result in results if result.states]
        shares = status_shares([result.numbers["threshold"] for result in there])
        return {
            name: torch.stack(
                [
                    share * result.states["model"][name]
                    for share, result in zip(shares, there, strict=True)
                ]
            ).sum(0)
            for name, _ in self.model.named_parameters()
        }


class Chosen(NamedTuple):
    """The images that a client trains on, and their labels."""

    labels: Tensor
    kept: Tensor
    """Confident enough for this client and class."""
    sure: Tensor
    """So confident that sharpness-aware consistency uses them."""
    threshold: Tensor
    """T, the client's mean confidence."""


def choose(probabilities: Tensor, sure_from: float) -> Chosen:
    """Choose by the client-specific adaptive threshold of Eq. (9): T p(c) / max p for class c, p the mean prediction."""
    confidence, labels = probabilities.max(1)
    threshold, mean = confidence.mean(), probabilities.mean(0)
    kept = confidence >= threshold * (mean / mean.max())[labels]
    return Chosen(labels, kept, confidence >= sure_from, threshold)


def status_shares(thresholds: list[float]) -> list[float]:
    """Return (1 - T_i) / sum (1 - T_j), Eq. (15): the less sure a client is, the more it still has to learn."""
    room = [max(1 - threshold, 1e-6) for threshold in thresholds]
    return [one / sum(room) for one in room]


def sharpness_loss(moved: Tensor, here: Tensor, sure: Tensor) -> Tensor:
    """Return the KL of predictions at adversarial weights from those at the model's own, over the whole batch."""
    divergence = F.kl_div(
        F.log_softmax(moved.float(), 1), here.detach().float().softmax(1), reduction="none"
    )
    return (divergence.sum(1) * sure).mean()


def adversarial(module: nn.Module, loss: Tensor, radius: float, eta: float) -> dict[str, Tensor]:
    """Return weights at which ``loss`` is about the highest within ``radius`` (Kwon et al., 2021); the module keeps its own.

    w + radius t t g / |t g|, with g the gradient and t = |w| + eta for weights, 1 for biases (ASAM).
    What is computed with them has its gradient with respect to w there. The loss can still be
    differentiated afterwards.
    """
    names, weights = zip(*module.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, weights, retain_graph=True, materialize_grads=True)
    scales: list[Tensor | float] = [
        weight.detach().abs().float() + eta if name.endswith("weight") else 1.0
        for name, weight in zip(names, weights, strict=True)
    ]
    scaled = [gradient.float() * scale for gradient, scale in zip(gradients, scales, strict=True)]
    length = torch.stack([part.norm() for part in scaled]).norm()
    factor = radius / (length + 1e-12)
    return {
        name: weight + (factor * part * scale).to(weight.dtype)
        for name, weight, part, scale in zip(names, weights, scaled, scales, strict=True)
    }


class FL2Work:
    """The client's half."""

    name = "fl2"
    answers = Answers({"model": every_tensor}, {**COUNTED, "threshold": (0.0, 1.0)})

    def start(self, client: ClientRuntime) -> bool:
        """Label the client's images once, and draw the round's batches from those that are kept."""
        model = client.model("model")
        model.load_state_dict(required_state(client, "model"))
        model.load_state_dict(client.received("statistics") or {}, strict=False)
        # Once per round, by the received model on one weak view of every image.
        chosen = choose(client.predict(model, "weak"), client.settings["confidence_threshold"])
        kept = chosen.kept.nonzero().flatten().cpu().numpy()
        places = client.draw_batches(client.rng("batches"), kept)
        index = torch.from_numpy(places).to(chosen.labels.device)
        client.set_buffer("labels", chosen.labels[index])
        client.set_buffer("sure", chosen.sure[index])
        client.set_buffer("threshold", chosen.threshold)
        client.draw_view("strong", "strong", places)
        start_counter(client)
        count_labels(client, chosen.labels, chosen.kept, client.truth(np.arange(client.count)))
        return True

    def step(self, client: ClientRuntime) -> None:
        """Take one sharpness-aware step on a batch of kept images."""
        model, images = client.model("model").train(), client.batch_of("strong")
        labels, sure = client.buffer_step("labels"), client.buffer_step("sure")
        logits = model(images)
        loss = cross_entropy(logits, labels)  # every image of a batch was kept
        # Sharpness-aware consistency of the images in ``sure``: climb their loss, agree there.
        climbed = consistency(logits, labels, sure)
        weights = adversarial(model, climbed, RHO, ETA)
        sharp = sharpness_loss(call_with(model, weights, images), logits, sure)
        client.descend(model, loss + sharp, clip_norm=CLIP_NORM)
        count_loss(client, loss + sharp, consistency=loss)

    def finish(self, client: ClientRuntime) -> tuple[dict[str, State], dict[str, float]]:
        """Return the trained model and what the client counted."""
        numbers = {**read_counter(client), "threshold": float(client.buffer("threshold"))}
        return {"model": client.model("model").state_dict()}, numbers
