"""Shared parts of methods that train whole models on clients: the model, supervised steps, reports."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from semisfl.algorithm.losses import cross_entropy
from semisfl.algorithm.teacher import Teacher
from semisfl.fleet.aggregate import combine
from semisfl.fleet.base import ClientResult, ClientRuntime, State
from semisfl.methods import statistics
from semisfl.methods.base import ServerDropout, Setup
from semisfl.settings.robust import FEWEST
from semisfl.settings.sections import LabeledView


class SupervisedPhase:
    """Steps down the cross-entropy of labelled images; after each, ``ema`` follows."""

    def __init__(
        self,
        setup: Setup,
        model: nn.Module,
        *,
        view: LabeledView | None = None,
        ema: Teacher[Any] | None = None,
        clip_norm: float | None = None,
    ) -> None:
        """Take the ``model`` to train, and an ``ema`` that follows each step.

        ``view``: how labelled images are shown (None: as the configuration says). ``clip_norm``: the largest
        norm of all gradients together.
        """
        self.labeled, self.model, self.ema, self.clip_norm = setup.labeled, model, ema, clip_norm
        self.view = view or setup.config.labeled_view
        self.dropout = ServerDropout(setup)
        self.sgd = setup.hardware.optimizer(model.parameters(), setup.config.optimizer)
        if ema is not None:
            ema.pair_with(self.sgd)
        self.meter = setup.hardware.meter()
        self._next_step = setup.make_step(self._step)

    def run(self, round_index: int, steps: int, lr: float) -> float:
        """Take ``steps`` steps at learning rate ``lr`` and return their mean loss; momentum starts at zero."""
        self.dropout.start(round_index)
        self.labeled.start(round_index, steps, self.view, views=1)
        self.sgd.restart(lr)
        for _ in range(steps):
            self._next_step()
        return float(self.meter.read()["loss_supervised"]) / steps

    def _step(self) -> None:
        images, labels = self.labeled.next()
        self.model.train()
        loss = cross_entropy(self.model(images), *labels)
        self.sgd.descend(loss, clip_norm=self.clip_norm)
        if self.ema is not None:
            self.ema.update()
        self.meter.add(loss_supervised=loss)


def required_state(client: ClientRuntime, name: str) -> State:
    """Return a state that this round sends to every client."""
    state = client.received(name)
    if state is None:
        raise ValueError(
            f"the server sends no {name!r} for a round; install the same semisfl on both sides"
        )
    return state


# A client counts on its device and reads once per round.
COUNTED = {"loss": (-1e6, 1e6), "loss_consistency": (-1e6, 1e6), "coverage": (0.0, 1.0)}
"""The numbers of `read_counter`, for `Answers.numbers`; in a simulation, counts by true class as well."""


def start_counter(client: ClientRuntime) -> None:
    """Set this client's sums of losses [3] and its table of label counts to zero."""
    client.set_buffer("loss_sums", torch.zeros(3))
    client.set_buffer("label_counts", torch.zeros(len(statistics.COUNTS), client.classes + 1))


def count_loss(client: ClientRuntime, loss: Tensor, consistency: Tensor) -> None:
    """Count a step's loss, and the part of it that is cross-entropy with pseudo-labels."""
    step = torch.stack([torch.ones_like(loss), loss, consistency])
    client.buffer("loss_sums").add_(step.detach().float())


def count_labels(client: ClientRuntime, labels: Tensor, kept: Tensor, truth: Tensor) -> None:
    """Count pseudo-labels, which of them are ``kept`` as confident, and which agree with ``truth``."""
    client.buffer("label_counts").add_(statistics.table(labels, kept, truth, client.classes))


def read_counter(client: ClientRuntime) -> dict[str, float]:
    """Return the round's mean losses and label counts as the numbers that a client answers."""
    steps, loss, consistency = client.buffer("loss_sums").tolist()
    counted = statistics.as_numbers(client.buffer("label_counts").tolist())
    return {"loss": loss / steps, "loss_consistency": consistency / steps, **counted}


def combine_results(setup: Setup, results: Sequence[ClientResult], name: str, sent: State) -> State:
    """Return state ``name`` of the contributing clients as one, by the rule of ``robust.aggregate``.

    ``sent`` is what they began with. If fewer clients contribute than a rule needs, those that took part and
    contributed nothing count as unchanged models: else a single client could decide the result.
    """
    robust = setup.config.robust
    states = {result.client: result.states[name] for result in results if result.states}
    if robust.aggregate != "mean" and len(states) < FEWEST <= len(results):
        states = {result.client: states.get(result.client, sent) for result in results}
    return combine(robust, states, sent, setup.fleet.held_back)


def report(results: Sequence[ClientResult]) -> dict[str, Any]:
    """Return the fields of a `MethodMetrics` from what the contributing clients counted.

    A client without states took part and had nothing to contribute; it is left out of all means.
    """
    there = [result for result in results if result.states]
    if not there:
        return {"contributing": 0}
    numbers = [result.numbers for result in there]
    return {
        "contributing": len(there),
        "loss_semi": sum(one["loss"] for one in numbers) / len(there),
        "loss_consistency": sum(one["loss_consistency"] for one in numbers) / len(there),
        "coverage_by_client": {str(result.client): result.numbers["coverage"] for result in there},
        **statistics.of_numbers(numbers),
    }
