"""The two halves of the method."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from fedavg_fixmatch import METHOD
from fedavg_fixmatch.settings import FixMatchSettings
from semisfl.algorithm.losses import consistency, pseudo_label
from semisfl.algorithm.schedule import learning_rate
from semisfl.fleet.base import Answers, ClientRuntime, FullRound, State, every_tensor
from semisfl.methods import full_model
from semisfl.methods.base import Setup
from semisfl.metrics import MethodMetrics


class FedAvgFixMatch:
    """The server's half: a round, what is tested, what a checkpoint holds."""

    entry = METHOD

    def __init__(self, setup: Setup) -> None:
        self.setup, self.settings = setup, setup.config.settings(FixMatchSettings)
        self.model = setup.model.whole()
        view = self.settings.labeled_view
        self.supervised = full_model.SupervisedPhase(setup, self.model, view=view)
        self.work = FixMatchWork()

    def round(self, round_index: int) -> MethodMetrics:
        config = self.setup.config
        lr = learning_rate(config.optimizer, round_index, config.rounds)
        loss = self.supervised.run(round_index, config.server.steps, lr)
        plan = FullRound(
            round_index,
            self.setup.active(round_index),
            config.clients.steps,
            lr,
            send={"model": self.model.state_dict()},
            settings={"confidence_threshold": self.settings.confidence_threshold},
        )
        results = self.setup.fleet.train(self.work, plan)
        sent = plan.send["model"]
        self.model.load_state_dict(full_model.combine_results(self.setup, results, "model", sent))
        return MethodMetrics(
            learning_rate=lr,
            supervised_steps=config.server.steps,
            loss_supervised=loss,
            **full_model.report(results),
        )

    def tested(self) -> Mapping[str, nn.Module]:
        return {"student": self.model}

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])


class FixMatchWork:
    """The client's half: the same code in a simulation, on a GPU and on a device of its own."""

    name = "fixmatch"
    answers = Answers({"model": every_tensor}, full_model.COUNTED)

    def start(self, client: ClientRuntime) -> bool:
        client.model("model").load_state_dict(full_model.required_state(client, "model"))
        places = client.draw_batches(client.rng("batches"), np.arange(client.count))
        client.draw_view("weak", "weak", places)
        client.draw_view("strong", "strong", places)
        client.set_buffer("truth", client.truth(places))
        full_model.start_counter(client)
        return True

    def step(self, client: ClientRuntime) -> None:
        model = client.model("model")
        with torch.no_grad():
            weak = model.eval()(client.batch_of("weak"))
        labels, confident = pseudo_label(weak, client.settings["confidence_threshold"])
        loss = consistency(model.train()(client.batch_of("strong")), labels, confident)
        client.descend(model, loss)
        full_model.count_loss(client, loss, consistency=loss)
        full_model.count_labels(client, labels, confident, client.buffer_step("truth"))

    def finish(self, client: ClientRuntime) -> tuple[dict[str, State], dict[str, float]]:
        return {"model": client.model("model").state_dict()}, full_model.read_counter(client)
