"""Build what a configuration describes: data, model, clients and method.

`assemble` is the only place where these parts meet. A simulation, a run of torchrun's ranks and a server of devices
differ in their fleet alone, which `FLEETS` chooses; the method that trains is the same object code in all three.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from semisfl import seeds
from semisfl.data.augment import Normalizer
from semisfl.data.dataset import Dataset
from semisfl.data.holdings import Holdings, count
from semisfl.data.labeled import LabeledImages
from semisfl.data.partition import Partition
from semisfl.engine.hardware import Hardware
from semisfl.engine.inference import outputs
from semisfl.fleet.base import Fleet
from semisfl.fleet.cluster.ranks import launch
from semisfl.fleet.frozen import collected
from semisfl.fleet.setup import FleetSetup, NetworkOptions
from semisfl.methods.base import Method, Setup
from semisfl.methods.probe import Probe, fit_head
from semisfl.metrics import RoundMetrics
from semisfl.models.build import build_model, check_same, with_layers_of, with_top
from semisfl.models.own import Own, own_copy, stages_of
from semisfl.models.zoo import layers_by_cut
from semisfl.runs.portable import Description, answering_weights, describe
from semisfl.runs.pretrained import Pretrained, mark_pretrained
from semisfl.runs.run_data import (
    check_partition,
    chosen,
    divide,
    load_data,
)
from semisfl.runs.scores import Scores
from semisfl.settings import lookup
from semisfl.settings.config import Config, ConfigError, cap_batch
from semisfl.settings.counts import plural
from semisfl.stopping import StopFlag

log = logging.getLogger(__name__)


@dataclass
class Experiment:
    """The parts of a run, ready for its first or next round.

    Its state is what the next round depends on: the method's models, queue and controller, what the fleet must know
    of its clients, and the bytes sent so far. The images are not part of it.
    """

    config: Config
    method: Method
    fleet: Fleet
    hardware: Hardware
    stop: StopFlag
    """Set by the owner of the run to end it; tests of the model check it too."""
    normalizer: Normalizer
    """Makes a model's input of uint8 images."""
    test_images: Tensor
    """uint8 [m, C, H, W], on the run's device."""
    test_labels: Tensor
    """int64 [m]"""
    validation: tuple[Tensor, Tensor] | None
    """Validation images and labels, on which rounds are judged; None: the test images are used."""
    description: Description
    """What a checkpoint says of the model."""
    holdings: Holdings
    """How many images of each class the server and each client hold."""

    @property
    def model(self) -> nn.Module:
        """Return the model that the run is judged by: the first that its method tests."""
        return next(iter(self.method.tested().values()))

    def evaluate(self) -> dict[str, Scores]:
        """Return the scores of each tested model, on the images that rounds are judged on."""
        return self._scores(*(self.validation or (self.test_images, self.test_labels)))

    def test(self) -> dict[str, Scores]:
        """Return the scores of each tested model, on the test images."""
        return self._scores(self.test_images, self.test_labels)

    def _scores(self, images: Tensor, labels: Tensor) -> dict[str, Scores]:
        """Return the scores by the model's name.

        The models are in the modes that the method left them in. Raises `Stopped` between two batches if asked to stop.
        """
        scores, dtype = {}, self.hardware.dtype
        for name, model in self.method.tested().items():
            with self.hardware.arithmetic():
                answers = outputs(
                    model, images, lambda batch: self.normalizer(batch, dtype), self.stop.check
                )
                predicted = torch.cat([logits.argmax(1) for logits in answers])
            scores[name] = Scores.of(predicted, labels, len(self.description.classes))
        return scores

    def state_dict(self) -> dict[str, Any]:
        """Return all state that the next round depends on, and the bytes sent so far."""
        return {
            "method": self.method.state_dict(),
            "fleet": self.fleet.state_dict(),
            "traffic": self.fleet.traffic.state_dict(),
            "optimizers": [one.state_dict() for one in self.hardware.lasting],
        }

    def model_state(self, tested: RoundMetrics | None) -> dict[str, Any]:
        """Return the weights and the description of the network that the run is judged by.

        ``tested`` are the metrics of the last round with a test, whose scores go into the description; None: there was
        no test yet.
        """
        described = replace(self.description, sent=self.fleet.traffic.by_kind())
        if tested is not None:
            described = replace(
                described,
                accuracy=tested.accuracy,
                test_accuracy=tested.test_accuracy,
                macro_f1=tested.macro_f1,
                recall_by_class=tested.recall_by_class,
                tested_after=tested.round + 1,
            )
        return {"description": described.as_dict(), "weights": answering_weights(self.model)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, as a resumed run does before its first round."""
        self.undo_round(state)
        self.fleet.load_state_dict(state["fleet"])

    def undo_round(self, before: Mapping[str, Any]) -> None:
        """Restore the state ``before`` a round, which may then be repeated.

        What the fleet knows of its clients stays: some may have connected since.
        """
        self.method.load_state_dict(before["method"])
        for optimizer, state in zip(
            self.hardware.lasting, before.get("optimizers", []), strict=True
        ):
            optimizer.load_state_dict(state)
        self.fleet.traffic.load_state_dict(before["traffic"])


FLEETS = {
    ("local", "trained"): "semisfl.fleet.local:LocalFleet",
    ("network", "trained"): "semisfl.net.server.fleet:NetworkFleet",
    ("cluster", "trained"): "semisfl.fleet.cluster.cluster_fleet:ClusterFleet",
    ("local", "frozen"): "semisfl.fleet.frozen:FrozenFleet",
    ("network", "frozen"): "semisfl.net.server.frozen:FrozenNetworkFleet",
    ("cluster", "frozen"): "semisfl.fleet.cluster.cluster_fleet:FrozenClusterFleet",
}
"""The class of each kind of fleet, by ``fleet.kind`` and ``clients.bottom``, made of a `FleetSetup`. Imported when chosen: a simulation needs no network packages."""


def make_clients(setup: FleetSetup) -> Fleet:
    """Return the fleet that the configuration names: by where the clients live, and by whether they train."""
    config = setup.config
    kind, bottom = config.fleet.kind, config.clients.bottom
    follows = any(getattr(own, "client_teacher", None) == "ema" for own in config.own_sections)
    if bottom == "frozen" and follows:
        log.info("client_teacher = 'ema' has no effect: with clients.bottom = 'frozen' none moves")
    return lookup.load(FLEETS[kind, bottom])(setup)


def fleet_setup(
    config: Config,
    data: Dataset,
    partition: Partition,
    hardware: Hardware,
    model: nn.Sequential | None = None,
    network: NetworkOptions | None = None,
    stop: StopFlag | None = None,
) -> FleetSetup:
    """Return what is needed to make the clients, on the device of ``hardware``.

    Clients in this process get the images of ``data`` and their indices in ``partition``; those on other machines
    have their own images, and get neither. A batch is at most as large as the largest client: more would show images
    twice in a step. ``model`` replaces the one that the configuration names. Raises ValueError for a partition that
    does not fit the images or the number of clients.
    """
    elsewhere = config.fleet.kind == "network"
    check_partition(config, partition, data)
    classes, images, labels, shards = len(data.classes), data.images, data.labels, partition.clients
    if config.data.features is not None:
        # Of the images whose rows are there, not even the labels are known.
        shards = tuple(np.arange(file.images) for file in collected(config))
        images, labels = images[:0], torch.full((max(map(len, shards)),), -1)
    if not elsewhere:
        # All clients of a step have batches of one size.
        config = cap_batch(config, max(map(len, shards)))
    return FleetSetup(
        config,
        build_model(config, data.shape, classes, model).to(hardware.device),
        hardware,
        data.shape,
        classes,
        data.mean,
        data.std,
        images=None if elsewhere else images.to(hardware.device),
        labels=None if elsewhere else labels.to(hardware.device),
        shards=shards,
        network=network,
        stop=stop or StopFlag(),
    )


def assemble(
    config: Config,
    data: Dataset | None = None,
    partition: Partition | None = None,
    model: Own | None = None,
    top: Own | None = None,
    device: str = "auto",
    network: NetworkOptions | None = None,
    make_fleet: Callable[[FleetSetup], Fleet] | None = None,
    stop: StopFlag | None = None,
    resumed: Mapping[str, Any] | None = None,
) -> Experiment:
    """Build everything that a run needs, and start its fleet.

    ``data``, ``partition``, ``model`` and ``make_fleet`` replace what the configuration names, and ``top`` the layers
    after the cut; ``model`` and ``top`` are copied, so the caller's modules keep their weights. ``device`` is "auto", "cpu", "cuda" or "cuda:N". ``network`` says where a
    server of devices listens. ``resumed`` is the checkpoint that the caller will load: ``model.weights`` is then not
    read. The configuration of the result names the layers of a ``model`` that was passed.

    Raises `ConfigError` or ValueError for settings, images and models that do not fit each other.
    """
    if config.fleet.kind == "network" and network is None and make_fleet is None:
        raise ConfigError(
            "fleet.kind = 'network': clients come to `semisfl serve`; use it, or fleet.kind = local"
        )
    if config.fleet.kind == "cluster" and (launched := launch()) is not None:
        device = launched.device(device)
    hardware, stop = Hardware(device, config.runtime), stop or StopFlag()
    make_method = lookup.load(lookup.method(config.method).code)
    weights, mean, std = None, None, None
    if config.model.weights is not None:
        # Weights need images that are normalised as theirs were; a resumed run knows how from its checkpoint. Weights
        # are read before images are decoded, because the message may be what to install.
        if resumed is None:
            weights = Pretrained.read(config.model.weights, config.model.name)
            mean, std = weights.mean, weights.std
        else:
            described = resumed["model"]["description"]
            mean, std = described["mean"], described["std"]
    if data is None:
        data, partition = load_data(config, partition)
    partition = partition or divide(config, data)
    if mean is not None and std is not None:
        data = data.for_network(mean, std)
    if top is not None:
        if model is not None:
            raise ValueError("give a model or a top, not both")
        layers, held = layers_by_cut(config.model, whole=False)
        config = config.model_copy(update={"model": config.model.model_copy(update={"cut": held})})
        table, seed = [layer for _, layer in layers], seeds.derive(config.seed, "model")
        model = with_top(table, top, data.shape, len(data.classes), seed)
    if model is not None:
        model = stages_of(model, data.shape)
        if resumed is None:
            config = with_layers_of(config, model)
        else:
            check_same(model, config.model.name, config.model.layers, config.model.cut)
        whole = lookup.method(config.method).works or config.model.layers is None
        if network is not None and config.model.is_code and whole:
            raise ConfigError(
                f"devices cannot build this model: {config.method} needs a table of layers, of a split method's bottom or "
                "else of the whole network; layers_of names the first layer that no kind describes"
            )
    if (config.data.validation is None) == bool(len(partition.validation)):
        raise ConfigError(
            f"data.validation = {config.data.validation}, and the partition sets "
            f"{plural(len(partition.validation), 'image')} aside for validation; set both, or neither"
        )
    if not len(data.test_images):
        raise ValueError(f"{data.name} has no test images; some are needed to judge the model by")
    own = own_copy(model, data.shape) if model is not None else None
    setup = fleet_setup(config, data, partition, hardware, own, network, stop)
    split_model, classes = setup.model, setup.classes
    new = list(resumed["model"]["description"].get("new_layers", ())) if resumed else []
    images, labels = (part.to(hardware.device) for part in chosen(data, partition.labeled))
    labeled = LabeledImages(setup.batches(images), labels, config, hardware.streams.while_busy)
    if weights is not None:
        new = weights.copy_into(split_model, config.model.name, data.classes)
        *_, (head, last) = split_model.top.named_children()
        # The probe fits one itself.
        if head in new and isinstance(last, nn.Linear) and make_method is not Probe:
            with hardware.arithmetic():
                fit_head(split_model.whole(), labeled, classes)
    if config.model.weights is not None:
        mark_pretrained(split_model, new)
    fleet = (make_fleet or make_clients)(setup)
    try:
        method = make_method(
            Setup(setup.config, split_model, fleet, labeled, classes, hardware, stop)
        )
        network_name, *_ = method.tested()
    except BaseException:
        fleet.close(finished=False)
        raise
    validation = None
    if len(partition.validation):
        images, labels = chosen(data, partition.validation)
        validation = images.to(hardware.device), labels.to(hardware.device)
    holdings = count(partition, data.labels.numpy(), data.classes)
    described = describe(config, data, partition, network_name, own)
    described = replace(described, new_layers=tuple(new))
    if partition.clients:
        holdings = replace(holdings, images=described.digests["images"])
    return Experiment(
        config,
        method,
        fleet,
        hardware,
        stop,
        setup.normalizer,
        data.test_images.to(hardware.device),
        data.test_labels.to(hardware.device),
        validation,
        described,
        holdings,
    )
