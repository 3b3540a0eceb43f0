"""FedMatch, labels at the server: theta = sigma + psi; the server learns sigma, the clients psi.

The algorithm follows its authors' code, with these differences:

- Biases are decomposed too. BatchNorm's affine weights belong to sigma, and its buffers are averaged;
  the original network has neither.
- Helpers stay with a client until it gets others; with ``keep_helpers = false`` for one round, as in
  the code.
- The losses have other weights, except in the variant ``fedmatch_original``.
- p(x) is read with dropout off. The learning rate follows a schedule, not a plateau.
- Weights are sent whole, not only the entries that changed.
"""

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semisfl import seeds
from semisfl.algorithm.losses import cross_entropy
from semisfl.algorithm.schedule import learning_rate
from semisfl.engine.host import HostShelf
from semisfl.fleet.aggregate import combine, long_updates
from semisfl.fleet.base import (
    Answers,
    ClientResult,
    ClientRuntime,
    FullRound,
    Regularisers,
    State,
    every_tensor,
)
from semisfl.methods.base import ServerDropout, Setup
from semisfl.methods.fedmatch.helpers import Helpers, noise_image
from semisfl.methods.fedmatch.settings import HELPERS, FedMatchSettings
from semisfl.methods.full_model import (
    COUNTED,
    count_labels,
    count_loss,
    read_counter,
    report,
    required_state,
    start_counter,
)
from semisfl.metrics import MethodMetrics
from semisfl.models.layers import batchnorms
from semisfl.models.passes import call_with, passes

PSI_FACTOR = 0.2
"""psi starts as this much of sigma, as in the authors' code."""
REFRESH = 10
"""Rounds between two choices of helpers, as in the authors' code."""
THRESHOLD = 1e-5
"""In the model that is tested, entries of psi up to this size are zero, as in the authors' code."""


def decomposed_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters that are a sum: all but BatchNorm's affine ones."""
    affine = _affine(model)
    return [name for name, parameter in model.named_parameters() if id(parameter) not in affine]


def sum_parameters(sigma: nn.Module, psi: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters theta = sigma + psi; BatchNorm's are sigma's alone.

    The parameters of a layer that is used twice have both names, as in a state dict.
    """
    affine = _affine(sigma)
    return {
        name: value if id(value) in affine else value + psi[name]
        for name, value in sigma.named_parameters(remove_duplicate=False)
    }


def _affine(model: nn.Module) -> set[int]:
    return {id(parameter) for layer in batchnorms(model) for parameter in layer.parameters()}


class FedMatch:
    """The server's half: it learns sigma on labels, averages the clients' psi and chooses their helpers."""

    def __init__(self, setup: Setup) -> None:
        self.setup, config = setup, setup.config
        self.settings = config.settings(FedMatchSettings)
        self.model = setup.model.whole()
        """theta as it is tested, and BatchNorm's buffers."""
        self.sigma = copy.deepcopy(self.model)
        self.names = decomposed_names(self.model)
        # sigma + psi is what training begins with, where that is more than random numbers.
        whole = 1.0 if config.model.weights is None else 1.0 + PSI_FACTOR
        for name, parameter in self.sigma.named_parameters():
            parameter.data.div_(whole if name in self.names else 1.0)
            ours = self.model.get_parameter(name)
            parameter.pretrained = getattr(ours, "pretrained", False)  # type: ignore[attr-defined]
        self.psi = copy.deepcopy(self.sigma).requires_grad_(False)
        for name, parameter in self.psi.named_parameters():
            parameter.mul_(PSI_FACTOR if name in self.names else 0.0)
        self.dropout = ServerDropout(setup)
        self.sgd = setup.hardware.optimizer(self.sigma.parameters(), config.optimizer)
        self.meter = setup.hardware.meter()
        self.supervised_step = setup.make_step(self._supervised_step)
        self.work = FedMatchWork()
        self.helpers = Helpers(HostShelf(setup.hardware.device))
        noise = noise_image(setup.labeled.shape, seeds.generator(config.seed, "noise"))
        self.noise = setup.labeled.normalized(noise)
        self._join()

    def round(self, round_index: int) -> MethodMetrics:
        """Descend sigma on labelled images, then let the active clients descend psi and take the mean."""
        config, steps = self.setup.config, self.setup.config.server.steps
        lr = learning_rate(config.optimizer, round_index, config.rounds)
        # The server descends sigma, psi fixed.
        self.dropout.start(round_index)
        self.setup.labeled.start(round_index, steps, config.labeled_view, views=1)
        self.sgd.restart(lr)
        for _ in range(steps):
            self.supervised_step()
        loss = self.meter.read()["loss_supervised"] / steps
        reported: dict[str, Any] = {}
        if round_index >= config.server.pretrain_rounds:
            # Clients descend psi, sigma fixed; helpers only every `REFRESH` rounds.
            results = self.setup.fleet.train(self.work, self._plan(round_index, lr))
            reported = report(results)
            self._aggregate(round_index, results)
        self._join()
        return MethodMetrics(
            learning_rate=lr, supervised_steps=steps, loss_supervised=loss, **reported
        )

    def _supervised_step(self) -> None:
        """Descend lambda_s CE of labelled images with respect to sigma; psi stays."""
        images, labels = self.setup.labeled.next()
        theta = sum_parameters(self.sigma, self.psi.state_dict())
        loss = cross_entropy(call_with(self.model.train(), theta, images), *labels)
        self.sgd.descend(self.settings.lambda_s * loss)
        self.meter.add(loss_supervised=loss)

    def _plan(self, round_index: int, lr: float) -> FullRound:
        """Return what the active clients are sent: sigma, psi and, in a round of choosing, their helpers."""
        config, settings = self.setup.config, self.settings
        active = self.setup.active(round_index)
        refresh = (round_index + 1) % REFRESH == 0
        self.helpers.keep(self.setup.fleet.members())
        if refresh:
            self.helpers.choose(active, HELPERS)
        elif not settings.keep_helpers:
            self.helpers.forget()
        helpers = {client: self.helpers.of(client) for client in active}
        buffers = self._buffers()
        current = {
            "sigma": {**self.sigma.state_dict(), **buffers},
            "psi": {**self.psi.state_dict(), **buffers},
        }
        return FullRound(
            round_index,
            active,
            config.clients.steps,
            lr,
            send=current,
            send_to=helpers if refresh else {},
            held={} if refresh else helpers,
            settings=settings.model_dump(),
        )

    @torch.no_grad()
    def _aggregate(self, round_index: int, results: list[ClientResult]) -> None:
        """Set psi and the buffers to the plain mean of the uploads, and renew the embeddings."""
        uploads = {r.client: r.states["psi"] for r in results if r.states}
        sent = {**self.psi.state_dict(), **self._buffers()}
        robust = self.setup.config.robust
        too_long = set() if robust.aggregate == "mean" else long_updates(uploads, sent)
        for client, upload in uploads.items():
            if client in too_long:
                continue  # it helps nobody: its earlier model does, if there is one
            theta = {**upload, **sum_parameters(self.sigma, upload)}
            with self.setup.hardware.arithmetic():
                logits = call_with(self.model.eval(), theta, self.noise)
            embedding = logits.float().softmax(1)[0]
            if embedding.isfinite().all():  # of a NaN no checkpoint could be written
                self.helpers.remember(client, round_index, upload, embedding)
        mean = combine(robust, uploads, sent, self.setup.fleet.held_back)
        self.psi.load_state_dict(mean)
        for name, buffer in self._buffers().items():
            buffer.copy_(mean[name])

    def _buffers(self) -> State:
        """Return the buffers of the model's state, such as BatchNorm's statistics."""
        state = self.model.state_dict()
        buffers = self.model.named_buffers(remove_duplicate=False)
        return {name: buffer for name, buffer in buffers if name in state}

    @torch.no_grad()
    def _join(self) -> None:
        """Make the tested theta, in which small entries of psi are zero."""
        parameters = self.psi.named_parameters(remove_duplicate=False)
        psi = {name: F.hardshrink(value, THRESHOLD) for name, value in parameters}
        self.model.load_state_dict(sum_parameters(self.sigma, psi), strict=False)

    def tested(self) -> Mapping[str, nn.Module]:
        """Return theta = sigma + psi."""
        return {"student": self.model}

    def state_dict(self) -> dict[str, Any]:
        """Return sigma, psi and the helpers."""
        return {
            "model": self.model.state_dict(),
            "sigma": self.sigma.state_dict(),
            "psi": self.psi.state_dict(),
            "helpers": self.helpers.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the state of a checkpoint, or from before a round that is undone."""
        for name in ("model", "sigma", "psi", "helpers"):
            getattr(self, name).load_state_dict(state[name])


def helper_names() -> list[str]:
    """Return the names under which a client receives its helpers."""
    return [f"helper{place}" for place in range(HELPERS)]


class FedMatchWork:
    """The client's half: steps down three losses on theta, of which only psi moves."""

    name = "fedmatch"
    only_called = ("helper*",)
    answers = Answers({"psi": every_tensor}, COUNTED)

    def start(self, client: ClientRuntime) -> bool:
        """Load sigma, psi and the helpers, and draw plain and strong views. Every client contributes."""
        sigma, psi = client.model("sigma"), client.model("psi")
        sigma.load_state_dict(required_state(client, "sigma"))
        psi.load_state_dict(required_state(client, "psi"))
        for name in helper_names():
            upload = client.received(name) or required_state(client, "psi")
            client.model(name).load_state_dict({**upload, **sum_parameters(sigma, upload)})
        client.sum_model("theta", fixed="sigma", learned="psi", names=decomposed_names(sigma))
        client.set_buffer("helped", torch.tensor(float(client.received("helper0") is not None)))
        indices = client.draw_batches(client.rng("batches"), np.arange(client.count))
        # Not weak ones: weak augmentation lowered its authors' accuracy.
        client.draw_view("plain", "plain", indices)
        client.draw_view("strong", "strong", indices)
        client.set_buffer("truth", client.truth(indices))
        start_counter(client)
        return True

    def step(self, client: ClientRuntime) -> None:
        """Take one step: agree with the majority's label, stay near the helpers, and be regularised.

        Labels and helpers see the plain view; the label loss is on the strong view of the same images.
        """
        settings, helped = client.settings, client.buffer("helped")
        theta, images = client.model("theta"), client.batch_of("plain")
        plain, strong = passes(theta, [images, client.batch_of("strong")], training=[False, True])
        own = plain.float().log_softmax(1)
        with torch.no_grad():
            helpers = [client.model(name).eval()(images) for name in helper_names()]
            # A helper is another client's upload: one that answers NaN must not make this client's weights NaN.
            guesses = torch.stack(helpers).float().softmax(2).nan_to_num(0.0)
            confident = own.exp().amax(1) >= settings["confidence_threshold"]
            labels = majority_labels(own, guesses, helped)
        weights = shares(confident, settings["mean_over"])
        of_images = F.cross_entropy(strong.float(), labels, reduction="none")
        by_label = settings["lambda_a"] * (of_images * weights).sum()
        loss = by_label + settings["lambda_i"] * helped * inter_client_loss(own, guesses, weights)
        # And l2 |sigma - psi|^2 + l1 |psi|_1. A step of theta is one of psi: sigma stays.
        regularisers = Regularisers(settings["lambda_l2"], settings["lambda_l1"])
        client.descend(theta, loss, regularisers=regularisers)
        count_loss(client, loss, consistency=by_label)
        count_labels(client, labels, confident, client.buffer_step("truth"))

    def finish(self, client: ClientRuntime) -> tuple[dict[str, State], dict[str, float]]:
        """Return psi with the buffers, and the round's numbers."""
        return {"psi": client.model("psi").state_dict()}, read_counter(client)


def shares(confident: Tensor, mean_over: str) -> Tensor:
    """Return the share [n] of each row in a loss's mean; 0 if it is not ``confident`` [n].

    ``mean_over``: the mean is over the whole ``batch``, and small if few rows are confident. Or it is over
    the ``confident`` ones, and a single one moves the model as far as a whole batch.
    """
    return confident / (len(confident) if mean_over == "batch" else confident.sum().clamp(min=1))


def majority_labels(own: Tensor, guesses: Tensor, helped: Tensor) -> Tensor:
    """Return the majority of the argmax votes of the model and its helpers; the lowest class of a tie.

    ``own`` [n, classes], ``guesses`` [helpers, n, classes]; ``helped`` is 0 if the client has no helpers, else 1.
    """
    votes = F.one_hot(torch.cat([own[None], guesses]).argmax(2), own.shape[1])
    return (votes[0] + helped * votes[1:].sum(0)).argmax(1)


def inter_client_loss(own: Tensor, guesses: Tensor, weights: Tensor) -> Tensor:
    """Return (1/J) sum_j KL(p_j(x) || p(x)), summed over the rows with their ``weights`` [n].

    ``own`` [n, classes]: log-probabilities of the model; ``guesses`` [J, n, classes]: the helpers' probabilities.
    """
    rows = F.kl_div(own.expand_as(guesses), guesses, reduction="none").sum(2)
    return (rows.mean(0) * weights).sum()
