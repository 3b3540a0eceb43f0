"""The memory and disk that a run needs on its server or in a simulation, compared with what is free."""

import shutil
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch

from semisfl.costs.about_images import AboutImages
from semisfl.costs.rounds import Priced
from semisfl.engine.hardware import free_memory
from semisfl.methods.sizes import Cost
from semisfl.models.memory import FP32
from semisfl.settings.config import Config, ConfigError
from semisfl.settings.counts import amount

CHECKPOINTS = 3
"""The latest, the one before it, and the next while it is written; ``best`` holds a model alone."""

LABEL = 10
"""Bytes of a key's label, and of whether it is confident and there at all."""


@dataclass(frozen=True)
class Needs:
    """Bytes. Memory is a lower bound: the framework's own code and workspace come on top."""

    memory: int
    host: int
    """Uploads that a method keeps: in the machine's own memory, also where a GPU computes."""
    disk: int


def needs(config: Config, held: AboutImages) -> Needs:
    """Return what this machine needs: the server, and the clients too unless they are elsewhere."""
    priced = Priced.of(config, held)
    server = of_server(priced)
    if config.fleet.kind == "network":
        return server
    return replace(server, memory=server.memory + _of_clients(priced))


def of_server(priced: Priced) -> Needs:
    """Return what a server needs whose clients live on other machines."""
    cost, cut, config = priced.usual or Cost(0, 0), priced.cut, priced.config
    head = FP32 * cut.head_flops(config.model.projector, config.model.projection) // 2
    head *= cost.work.head
    views = 2 if config.labeled_view == "both" else 1
    # Student, gradients, momentum and teacher on the server.
    memory = cut.memory(config.server.batch * views, 4, 1, whole=True) + 4 * head
    if cost.features:
        # Of every client: student and teacher features, their gradients, and what the top keeps of them.
        kept = sum(layer.kept for layer in cut.layers[cut.index :])
        rows = config.clients.active * priced.config.clients.batch
        memory += FP32 * rows * (3 * cut.features + kept)
    tensors = [item for layer in cut.layers for item in layer.state]
    model = sum(prod(shape) * dtype.itemsize for shape, dtype in tensors)
    seen = min(config.clients.total, config.clients.active * config.client_rounds)
    saved = cost.saved
    uploads = seen * saved.uploads * model
    width = cut.features if config.model.projector == "none" else config.model.projection
    key = FP32 * width + LABEL
    state = saved.models * (model + head) + uploads + saved.keys * key
    return Needs(memory, uploads, CHECKPOINTS * state + model)


def _of_clients(priced: Priced) -> int:
    cost, clients = priced.usual or Cost(0, 0), priced.config.clients
    if not cost.total:
        return 0
    split, work = cost.features > 0, cost.work
    # All clients of a split round are in memory together; whole models may take turns.
    together = clients.active if split else 1
    return together * priced.cut.memory(clients.batch, work.copies, work.kept, whole=not split)


def check(config: Config, held: AboutImages, place: Path, device: str) -> None:
    """Raise a ConfigError if the run in ``place`` needs more memory or disk than is free."""
    wanted = needs(config, held)
    memory, disk = free_on(device), _free_disk(place)
    # A GPU computes in bf16 as a rule, with half the bytes.
    least = wanted.memory + wanted.host if _on_cpu(device) else wanted.memory // 2
    if not _on_cpu(device) and (own := free_memory()) is not None and wanted.host > own:
        raise ConfigError(
            f"{config.method} keeps {amount(wanted.host)} of its clients' models in memory and "
            f"{amount(own)} are free; lower clients.total = {config.clients.total}, or choose a smaller model"
        )
    if memory is not None and least > memory:
        raise ConfigError(
            f"this run needs at least {amount(least)} of memory and "
            f"{amount(memory)} are free; lower clients.batch = {config.clients.batch}, "
            f"clients.active = {config.clients.active} or server.batch = {config.server.batch}, "
            "or choose a smaller model"
        )
    if disk is not None and wanted.disk > disk:
        raise ConfigError(
            f"the checkpoints of this run need {amount(wanted.disk)} and {amount(disk)} are "
            f"free at {place}; name another --out, or choose a smaller model"
        )


def free_on(device: str) -> int | None:
    """Return the free bytes of the GPU, or of this machine; None if the system does not say."""
    if _on_cpu(device):
        return free_memory()
    return int(torch.cuda.mem_get_info(None if device == "auto" else device)[0])


def _on_cpu(device: str) -> bool:
    return device == "cpu" or not torch.cuda.is_available()


def _free_disk(place: Path) -> int | None:
    """Return the free bytes where ``place`` will be; None for a file system without a size."""
    there = next(path for path in (place.absolute(), *place.absolute().parents) if path.exists())
    usage = shutil.disk_usage(there)
    return usage.free if usage.total else None
