"""SemiFL: clients train on pseudo-labels that the received global model gives once per round.

It follows its authors' code. (Their epochs are `clients.epochs`, and their momentum is kept between rounds,
`optimizer.keep_momentum`.) One thing differs. The authors recompute the statistics of static
BatchNorm (sBN) over the data of all clients. Here the server and the clients of the coming round do,
which costs only the bytes that are counted. Models without BatchNorm skip it.
"""

from collections.abc import Mapping
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from semisfl.algorithm.losses import cross_entropy
from semisfl.algorithm.schedule import learning_rate
from semisfl.fleet.base import (
    Answers,
    ClientResult,
    ClientRuntime,
    ClientWork,
    FullRound,
    State,
    every_tensor,
)
from semisfl.methods.base import Setup
from semisfl.methods.full_model import (
    COUNTED,
    SupervisedPhase,
    combine_results,
    count_labels,
    count_loss,
    read_counter,
    report,
    required_state,
    start_counter,
)
from semisfl.methods.semifl.settings import SemiFLSettings
from semisfl.methods.semifl.static_batchnorm import (
    SBN_BATCH,
    combine_statistics,
    is_statistic,
    recompute_statistics,
    statistics_of,
)
from semisfl.metrics import MethodMetrics
from semisfl.models.passes import passes

# All three as in its authors' code.
CLIP_NORM = 1.0
"""Largest norm of a gradient, on clients and on the server."""
GLOBAL_MOMENTUM = 0.5
"""Momentum of the server's aggregation."""
MIX_ALPHA = 0.75
"""The weight of a mixed image is drawn from Beta(MIX_ALPHA, MIX_ALPHA)."""


class SemiFL:
    """The server's half: distribute, average with global momentum, fine-tune on labels, renew sBN.

    (FL)² derives from it and changes who counts how much in the mean.
    """

    def __init__(self, setup: Setup, settings: Any = None, work: ClientWork | None = None) -> None:
        """Take ``settings`` and ``work`` of another method whose server does the same."""
        self.setup, self.settings = setup, settings or setup.config.settings(SemiFLSettings)
        self.model = setup.model.whole()
        self.velocity = [torch.zeros_like(parameter) for parameter in self.model.parameters()]
        self.supervised = SupervisedPhase(setup, self.model, clip_norm=CLIP_NORM)
        self.work, self.statistics_work = work or SemiFLWork(), StatisticsWork()

    def round(self, round_index: int) -> MethodMetrics:
        """Let the active clients train, move the model by their mean with global momentum, then fine-tune on labels."""
        config = self.setup.config
        lr = learning_rate(config.optimizer, round_index, config.rounds)
        reported: dict[str, Any] = {}
        if round_index >= config.server.pretrain_rounds:
            active = self.setup.active(round_index)
            if round_index == 0:
                self._recompute_statistics(round_index, active)
            # Distribute. With sBN the clients hold the model already; its statistics are new to them.
            statistics = statistics_of(self.model)
            state = self.model.state_dict()
            plan = FullRound(
                round_index,
                active,
                config.clients.steps,
                lr,
                send={"statistics": statistics} if statistics else {"model": state},
                held={client: {"model": state} for client in active} if statistics else {},
                settings=self.settings.model_dump(),
            )
            results = self.setup.fleet.train(self.work, plan)
            self._aggregate(results)
            reported = report(results)
        # Fine-tune on the server's labels.
        loss = self.supervised.run(round_index, config.server.steps, lr)
        # Before the test and the next distribution, which see the same model.
        then = round_index + 1
        coming = self.setup.active(then) if then >= config.server.pretrain_rounds else ()
        self._recompute_statistics(round_index, coming)
        return MethodMetrics(
            learning_rate=lr,
            supervised_steps=config.server.steps,
            loss_supervised=loss,
            **reported,
        )

    @torch.no_grad()
    def _aggregate(self, results: list[ClientResult]) -> None:
        """Set g = w - mean of the clients'; v <- m v + g; w <- w - v. If nobody contributed, w stays."""
        if not any(result.states for result in results):
            return
        mean = self._mean(results)
        for (name, parameter), velocity in zip(
            self.model.named_parameters(), self.velocity, strict=True
        ):
            velocity.mul_(GLOBAL_MOMENTUM).add_(parameter - mean[name])
            parameter.sub_(velocity)

    def _mean(self, results: list[ClientResult]) -> State:
        """Return the clients' models as one; (FL)² weighs them."""
        return combine_results(self.setup, results, "model", self.model.state_dict())

    def _recompute_statistics(self, round_index: int, active: tuple[int, ...]) -> None:
        """Compute sBN over un-augmented images of the server and the ``active`` clients, and load it.

        Without BatchNorm in the model nothing happens and nothing is sent.
        """
        if not statistics_of(self.model):
            return
        plan = FullRound(round_index, active, 0, 0.0, send={"model": self.model.state_dict()})
        results = self.setup.fleet.train(self.statistics_work, plan) if active else []
        batches = recompute_statistics(self.model, self.setup.labeled.plain(SBN_BATCH))
        own = statistics_of(self.model)
        parts = self._of_clients([result for result in results if result.states], own)
        self.model.load_state_dict(
            combine_statistics([(own, float(batches)), *parts]), strict=False
        )

    def _of_clients(
        self, results: list[ClientResult], own: State
    ) -> list[tuple[Mapping[str, Tensor], float]]:
        """Return clients' statistics with their numbers of batches, limited as their weights are.

        A rule other than the mean sees how far each client's are from the server's. The clients
        count alike then: each says itself how many batches it has.
        """
        counts = [result.numbers["batches"] for result in results]
        if self.setup.config.robust.aggregate == "mean" or not results:
            pairs = zip(results, counts, strict=True)
            return [(result.states["statistics"], count) for result, count in pairs]
        together = combine_results(self.setup, results, "statistics", own)
        return [(together, len(counts) * median(counts))]

    def tested(self) -> Mapping[str, nn.Module]:
        """Return the model, with statistics of the server's and the coming clients' images."""
        return {"student": self.model}

    def state_dict(self) -> dict[str, Any]:
        """Return the model and the server's momentum."""
        return {"model": self.model.state_dict(), "velocity": self.velocity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the state of a checkpoint, or from before a round that is undone."""
        self.model.load_state_dict(state["model"])
        for mine, saved in zip(self.velocity, state["velocity"], strict=True):
            mine.copy_(saved)


class SemiFLWork:
    """The client's half: label all images once, then train on the confident ones, plain and mixed."""

    name = "semifl"
    only_called = ("model",)
    answers = Answers({"model": every_tensor}, COUNTED, may_decline=True)

    def start(self, client: ClientRuntime) -> bool:
        """Label every local image, draw D_fix and D_mix and their views; False if no image is confident."""
        model = client.model("model")
        model.load_state_dict(required_state(client, "model"))
        model.load_state_dict(client.received("statistics") or {}, strict=False)
        # Pseudo-labels of every local image, once, by the received model on one weak view.
        confidence, labels = client.predict(model, "weak").max(1)
        confident = confidence >= client.settings["confidence_threshold"]
        kept = confident.nonzero().flatten().cpu().numpy()
        # D_fix: the kept. D_mix: as many draws with replacement from all, of any confidence.
        rng = client.rng("batches")
        fix = client.draw_batches(rng, kept)
        mix = client.draw_batches(rng, rng.integers(client.count, size=len(kept)))
        client.set_buffer("labels_fix", labels[torch.from_numpy(fix).to(labels.device)])
        client.set_buffer("labels_mix", labels[torch.from_numpy(mix).to(labels.device)])
        client.set_buffer(
            "weight", torch.from_numpy(rng.beta(MIX_ALPHA, MIX_ALPHA, size=client.steps)).float()
        )
        client.draw_view("strong", "strong", fix)
        client.draw_view("weak_fix", "weak", fix)
        client.draw_view("weak_mix", "weak", mix)
        start_counter(client)
        count_labels(client, labels, confident, client.truth(np.arange(client.count)))
        return len(kept) > 0

    def step(self, client: ClientRuntime) -> None:
        """Take one step down CE of the strong view and of the mixed images, gradients clipped."""
        model = client.model("model")
        labels, others = client.buffer_step("labels_fix"), client.buffer_step("labels_mix")
        weight = client.buffer_step("weight")
        mixed = mix(client.batch_of("weak_fix"), client.batch_of("weak_mix"), weight)
        of_strong, of_mixed = passes(
            model, [client.batch_of("strong"), mixed], training=[True, True]
        )
        strong, mixing = semifl_losses(of_strong, of_mixed, labels, others, weight)
        client.descend(model, strong + mixing, clip_norm=CLIP_NORM)
        count_loss(client, strong + mixing, consistency=strong)

    def finish(self, client: ClientRuntime) -> tuple[dict[str, State], dict[str, float]]:
        """Return the trained model and the round's numbers."""
        return {"model": client.model("model").state_dict()}, read_counter(client)


def mix(images: Tensor, others: Tensor, weight: Tensor) -> Tensor:
    """x_mix = l x_fix + (1 - l) x'_mix, one l per batch, as it was drawn (no max(l, 1 - l))."""
    return torch.lerp(others, images, weight.to(images.dtype))


def semifl_losses(
    strong: Tensor, mixed: Tensor, labels: Tensor, others: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss's two terms: CE(strong, y_fix), and l CE(mixed, y_fix) + (1 - l) CE(mixed, y_mix).

    ``strong`` and ``mixed`` [n, classes] are logits, ``labels`` and ``others`` [n] classes; ``weight`` is l.
    """
    return cross_entropy(strong, labels), torch.lerp(
        cross_entropy(mixed, others), cross_entropy(mixed, labels), weight
    )


class StatisticsWork:
    """A client's part of sBN: no step, only its images' statistics under the model it is sent."""

    name = "batchnorm-statistics"
    only_called = ("model",)
    answers = Answers({"statistics": is_statistic}, {"batches": (1.0, 1e6)})

    def start(self, client: ClientRuntime) -> bool:
        """Recompute the statistics of the received model over this client's images. Every client contributes."""
        model = client.model("model")
        model.load_state_dict(required_state(client, "model"))
        client.set_buffer(
            "batches", torch.tensor(recompute_statistics(model, client.images("plain", SBN_BATCH)))
        )
        return True

    def step(self, client: ClientRuntime) -> None:
        """Do nothing: statistics take no step."""

    def finish(self, client: ClientRuntime) -> tuple[dict[str, State], dict[str, float]]:
        """Return the statistics and over how many batches they are."""
        return {"statistics": statistics_of(client.model("model"))}, {
            "batches": float(client.buffer("batches"))
        }
