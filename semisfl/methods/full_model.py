"""What methods share that train whole models on clients: the model, supervised steps, reports."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semisfl.algorithm.teacher import Teacher
from semisfl.engine.sgd import SGD
from semisfl.fleet.base import ClientResult, ClientRuntime, State
from semisfl.methods.base import Meter, ServerDropout, Setup
from semisfl.models import SplitModel
from semisfl.sections import View


def whole(model: SplitModel) -> nn.Sequential:
    """The model without its projection head: what is trained, sent and tested, and how it is named."""
    return nn.Sequential(OrderedDict(bottom=model.bottom, top=model.top))


class SupervisedPhase:
    """Steps down the cross-entropy of labelled images; after each, ``ema`` follows."""

    def __init__(
        self,
        setup: Setup,
        model: nn.Module,
        *,
        view: View = "weak",
        ema: Teacher[Any] | None = None,
        clip_norm: float | None = None,
    ) -> None:
        self.labeled, self.model, self.view, self.ema, self.clip_norm = (
            setup.labeled,
            model,
            view,
            ema,
            clip_norm,
        )
        self.dropout = ServerDropout(setup)
        self.sgd = SGD(
            model.parameters(),
            setup.config.optimizer,
            setup.hardware.streams,
            ema.average if ema is not None else None,
        )
        self.meter = Meter(setup.hardware)
        self._captured = setup.capture(self._step)

    def run(self, round_index: int, steps: int, lr: float) -> float:
        """So many steps; their mean loss."""
        self.dropout.start(round_index)
        self.labeled.start(round_index, steps, self.view, views=1)
        self.sgd.restart(lr)
        for _ in range(steps):
            self._captured()
        return float(self.meter.read()["loss_supervised"]) / steps

    def _step(self) -> None:
        images, labels = self.labeled.next()
        self.model.train()
        loss = F.cross_entropy(self.model(images).float(), labels)
        self.sgd.descend(loss, clip_norm=self.clip_norm)
        if self.ema is not None:
            self.ema.update()
        self.meter.add(loss_supervised=loss)


def given(client: ClientRuntime, name: str) -> State:
    """A state that this round sends to every client."""
    state = client.received(name)
    assert state is not None, f"the server half sends no {name!r}"
    return state


# A client counts on its device and reads once per round: [steps, loss, images, kept images].
COUNTED = {"loss": (-1e6, 1e6), "coverage": (0.0, 1.0)}
"""What `read_counter` gives, for `Answers.numbers`."""


def start_counter(client: ClientRuntime) -> None:
    client.hold("counter", torch.zeros(4))


def count(client: ClientRuntime, loss: Tensor, kept: Tensor) -> None:
    kept = kept.float()
    counts = torch.stack(
        [torch.ones_like(loss), loss, torch.full_like(loss, len(kept)), kept.sum()]
    )
    client.held("counter").add_(counts.detach().float())


def read_counter(client: ClientRuntime) -> dict[str, float]:
    steps, loss, images, kept = client.held("counter").tolist()
    return {"loss": loss / steps, "coverage": kept / images}


def states_of(results: Sequence[ClientResult], name: str) -> list[State]:
    """State ``name`` of every client that contributed."""
    return [result.states[name] for result in results if result.states]


def report(results: Sequence[ClientResult]) -> dict[str, Any]:
    """Fields of a `MethodRow` from what the contributing clients counted."""
    there = [result for result in results if result.states]
    if not there:
        return {"contributing": 0}
    coverage = {str(result.client): result.numbers["coverage"] for result in there}
    return {
        "contributing": len(there),
        "loss_semi": sum(result.numbers["loss"] for result in there) / len(there),
        "mask_rate": 1 - sum(coverage.values()) / len(there),
        "coverage_by_client": coverage,
    }
