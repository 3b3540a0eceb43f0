"""Runs: put a configuration's pieces together, do its rounds, test, checkpoint, resume."""

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from semisfl import checkpoint, models, seeds
from semisfl.config import Config
from semisfl.data import partition as partitions
from semisfl.data import sources
from semisfl.data.augment import Augmentation, Normalizer
from semisfl.data.batches import RoundBatches
from semisfl.data.partition import Partition
from semisfl.data.sources import Dataset
from semisfl.fleet.base import Fleet, RoundAborted
from semisfl.fleet.local import LocalFleet
from semisfl.hardware import Hardware, Stopped
from semisfl.methods import METHODS
from semisfl.methods.base import LabeledImages, Method, Setup
from semisfl.rundir import RunDirectory

log = logging.getLogger(__name__)
TEST_BATCH = 500
Observer = Callable[[dict[str, Any]], None]


@dataclass
class Result:
    """What a run gives back."""

    accuracy: float
    """Of the method's tested model after the last round, in percent."""
    best: float
    model: nn.Module
    rounds: list[dict[str, Any]] = field(repr=False)
    stopped: bool = False
    directory: Path | None = None


@dataclass
class Experiment:
    """A configuration's pieces, put together."""

    config: Config
    method: Method
    fleet: Fleet
    hardware: Hardware
    normalizer: Normalizer
    test_images: Tensor
    test_labels: Tensor

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Test accuracy in percent of each tested model."""
        accuracies = {}
        for name, model in self.method.tested().items():
            mode = model.training
            model.eval()
            hits = torch.zeros((), device=self.hardware.device)
            with self.hardware.arithmetic():
                for images, labels in zip(
                    self.test_images.split(TEST_BATCH),
                    self.test_labels.split(TEST_BATCH),
                    strict=True,
                ):
                    hits += (
                        model(self.normalizer(images, self.hardware.dtype)).argmax(1) == labels
                    ).sum()
            model.train(mode)
            accuracies[name] = 100 * float(hits) / len(self.test_labels)
        return accuracies


def load_data(config: Config) -> tuple[Dataset, Partition]:
    """The images a configuration names and who holds which."""
    data = sources.load(config.data.name, size=config.data.size)
    for note in data.notes:
        log.warning("%s", note)
    return data, divide(config, data)


def divide(config: Config, data: Dataset) -> Partition:
    """Labelled images for the server, the others for the clients."""
    kind = config.data.partition.kind
    if kind == "folders" or data.clients is not None:
        return partitions.by_folder(data, labeled=config.data.labeled, seed=config.seed)
    return partitions.split(
        data.labels.numpy(),
        labeled=config.data.labeled,
        clients=config.clients.total,
        kind=kind,
        alpha=config.data.partition.alpha,
        seed=config.seed,
        classes=len(data.classes),
    )


def assemble(
    config: Config,
    data: Dataset | None = None,
    partition: Partition | None = None,
    model: nn.Sequential | None = None,
    device: str = "auto",
    make_fleet: Callable[..., Fleet] = LocalFleet,
) -> Experiment:
    """Everything a run needs. ``data``, ``partition`` and ``model`` replace what the configuration names."""
    hardware = Hardware(device, config.runtime)
    if data is None:
        data, loaded = load_data(config)
        partition = partition or loaded
    elif partition is None:
        partition = divide(config, data)
    if len(partition.clients) != config.clients.total:
        raise ValueError(
            f"the data has {len(partition.clients)} clients but clients.total = {config.clients.total}; "
            f"set clients.total = {len(partition.clients)}"
        )
    shape = (data.images.shape[1], data.images.shape[2], data.images.shape[3])
    split_model = build_model(config, model, shape, len(data.classes)).to(hardware.device)
    images, labels = data.images.to(hardware.device), data.labels.to(hardware.device)
    augment = config.data.augment
    augmentation = Augmentation(
        flip=augment.flip, pad=augment.pad, num_ops=augment.operations, cutout=augment.cutout
    )
    normalizer = Normalizer.of(data.mean, data.std).to(hardware.device)
    chosen = torch.from_numpy(partition.labeled).to(hardware.device)
    batches = RoundBatches(
        images[chosen], augmentation, normalizer, hardware.dtype, whole=hardware.capture
    )
    labeled = LabeledImages(batches, labels[chosen], config, hardware)
    fleet = make_fleet(
        split_model, images, labels, partition.clients, config, augmentation, normalizer, hardware
    )
    unlabeled = sum(len(shard) for shard in partition.clients)
    share = len(labeled) / (len(labeled) + unlabeled)
    setup = Setup(config, split_model, fleet, labeled, len(data.classes), share, hardware)
    return Experiment(
        config,
        METHODS[config.method].make(setup),
        fleet,
        hardware,
        normalizer,
        data.test_images.to(hardware.device),
        data.test_labels.to(hardware.device),
    )


def build_model(
    config: Config, model: nn.Sequential | None, shape: models.Shape, classes: int
) -> models.SplitModel:
    settings = config.model
    seed = seeds.derive(config.seed, "model")
    if model is None:
        return models.build(
            settings.name,
            shape,
            classes,
            cut=settings.cut,
            projector=settings.projector,
            projection=settings.projection,
            seed=seed,
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return models.split(model, shape, settings.cut, settings.projector, settings.projection)


def train(
    config: Config,
    *,
    data: Dataset | None = None,
    partition: Partition | None = None,
    model: nn.Sequential | None = None,
    device: str = "auto",
    out: Path | str | None = None,
    observe: Observer | None = None,
) -> Result:
    """Train as ``config`` says; with ``out``, keep a run directory there."""
    experiment = assemble(config, data, partition, model, device)
    # Only now: a mistake found above leaves no directory behind to stand in the next try's way.
    directory = RunDirectory.create(Path(out), config) if out is not None else None
    return run_rounds(experiment, directory, observe=observe)


def resume(
    path: Path | str, *, device: str = "auto", observe: Observer | None = None, **own: Any
) -> Result:
    """Continue the run in ``path`` from its latest checkpoint; ``own`` data and model as in `train`."""
    directory = RunDirectory.open(Path(path))
    experiment = assemble(directory.config(), device=device, **own)
    return run_rounds(experiment, directory, state=directory.load("latest"), observe=observe)


def run_rounds(
    experiment: Experiment,
    directory: RunDirectory | None = None,
    *,
    state: dict[str, Any] | None = None,
    observe: Observer | None = None,
) -> Result:
    """Do the rounds that are left after ``state`` (none: all of them)."""
    config, method, fleet, hardware = (
        experiment.config,
        experiment.method,
        experiment.fleet,
        experiment.hardware,
    )
    history: list[dict[str, Any]] = []
    first, best = 0, 0.0
    best_state: dict[str, Any] | None = None
    if state is not None:
        method.load_state_dict(state["method"])
        fleet.traffic.load_state_dict(state["traffic"])
        first, best = state["round"], state["best"]
        if directory is not None:
            history = directory.keep_metrics_before(first)

    def full_state(next_round: int) -> dict[str, Any]:
        return {
            "round": next_round,
            "best": best,
            "method": method.state_dict(),
            "traffic": fleet.traffic.state_dict(),
        }

    with ExitStack() as stack:
        if directory is not None:
            handler = directory.log_to_file()
            root = logging.getLogger("semisfl")
            root.addHandler(handler)
            if not root.isEnabledFor(logging.INFO):
                stack.callback(root.setLevel, root.level)
                root.setLevel(logging.INFO)
            stack.callback(root.removeHandler, handler)
            stack.callback(handler.close)
        log.info(
            "%s, rounds %d to %d on %s", config.method, first, config.rounds - 1, hardware.device
        )
        round_index = first
        while round_index < config.rounds:
            # A stopped or aborted round is undone: the checkpoint is always a round's start.
            before = checkpoint.snapshot(full_state(round_index))
            started = time.perf_counter()
            try:
                fleet.wait_ready()
                row = {"round": round_index, **method.round(round_index)}
            except RoundAborted as aborted:
                log.warning("round %d is repeated: %s", round_index, aborted)
                method.load_state_dict(before["method"])
                fleet.traffic.load_state_dict(before["traffic"])
                continue
            except Stopped:
                if directory is not None:
                    directory.save("latest", before)
                    _save_best(directory, best_state)
                log.info("stopped before round %d was complete", round_index)
                return _result(method, history, best, stopped=True, directory=directory)
            last = round_index == config.rounds - 1
            if last or (round_index + 1) % config.runtime.evaluate_every == 0:
                for name, accuracy in experiment.evaluate().items():
                    row.setdefault("accuracy", accuracy)
                    row[f"accuracy_{name}"] = accuracy
            row["bytes"] = fleet.traffic.by_kind()
            row["bytes_total"] = fleet.traffic.total()
            row["seconds"] = time.perf_counter() - started
            history.append(row)
            improved = row.get("accuracy", -1.0) > best
            best = max(best, row.get("accuracy", 0.0))
            round_index += 1
            if directory is not None:
                directory.append(row)
                if improved:
                    best_state = checkpoint.snapshot(full_state(round_index))
                if last or round_index % config.runtime.checkpoint_every == 0:
                    directory.save("latest", full_state(round_index))
                    best_state = _save_best(directory, best_state)
            if observe is not None:
                observe(row)
    return _result(method, history, best, stopped=False, directory=directory)


def _save_best(directory: RunDirectory, state: dict[str, Any] | None) -> dict[str, Any] | None:
    """Write the best state since the last checkpoint; what could not be written is kept for the next."""
    return None if state is None or directory.save("best", state) else state


def _result(
    method: Method,
    history: list[dict[str, Any]],
    best: float,
    *,
    stopped: bool,
    directory: RunDirectory | None,
) -> Result:
    tested = [row["accuracy"] for row in history if "accuracy" in row]
    return Result(
        accuracy=tested[-1] if tested else float("nan"),
        best=best,
        model=next(iter(method.tested().values())),
        rounds=history,
        stopped=stopped,
        directory=directory.path if directory else None,
    )
