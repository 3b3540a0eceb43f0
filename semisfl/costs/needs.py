"""The memory and disk that a simulated run needs, with the formulas of `plan`, compared with what is free."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from semisfl.costs.about_images import AboutImages
from semisfl.costs.rounds import Priced
from semisfl.data.partition import Partition
from semisfl.data.sources import Dataset
from semisfl.methods.sizes import Cost
from semisfl.models.memory import FP32
from semisfl.settings.config import Config, ConfigError

CHECKPOINTS = 3
"""The latest, the one before it, and the best."""
GIGA = 1e9


@dataclass(frozen=True)
class Needs:
    """Bytes. Both are lower bounds: the framework's own code and workspace come on top."""

    memory: int
    disk: int


def needs(config: Config, held: AboutImages) -> Needs:
    """Return what a run needs whose clients live in this process."""
    priced = Priced.of(config, held)
    cost, cut = priced.usual or Cost(0, 0), priced.cut
    work, server = cost.work, config.server
    head = FP32 * cut.head_flops(config.model.projector, config.model.projection) // 2
    views = 2 if config.labeled_view == "both" else 1
    # Student, gradients, momentum and teacher on the server.
    memory = cut.memory(server.batch * views, 4, 1, whole=True) + 4 * head * work.head
    batch = min(config.clients.batch, max(held.each.values(), default=config.clients.batch))
    if cost.total:
        split = cost.features > 0
        # All clients of a split round are in memory together; whole models may take turns.
        together = config.clients.active if split else 1
        memory += together * cut.memory(batch, work.copies, work.kept, whole=not split)
    weights = FP32 * sum(layer.parameters for layer in cut.layers)
    return Needs(memory, CHECKPOINTS * 2 * (weights + head * work.head))


def about(data: Dataset, partition: Partition) -> AboutImages:
    """Return the facts about images that are loaded."""
    each = {client: len(images) for client, images in enumerate(partition.clients)}
    mean = sum(each.values()) / max(1, len(each))
    return AboutImages(data.shape, len(data.classes), mean, each)


def check(config: Config, held: AboutImages, place: Path, device: str) -> None:
    """Raise a ConfigError if the run in ``place`` needs more memory or disk than is free."""
    wanted = needs(config, held)
    memory, disk = free_memory(device), _free_disk(place)
    # A GPU computes in bf16 as a rule, with half the bytes.
    least = wanted.memory // (1 if _on_cpu(device) else 2)
    if memory is not None and least > memory:
        raise ConfigError(
            f"this run needs at least {least / GIGA:.1f} GB of memory and "
            f"{memory / GIGA:.1f} GB are free; lower clients.batch = {config.clients.batch}, "
            f"clients.active = {config.clients.active} or server.batch = {config.server.batch}, "
            "or choose a smaller model"
        )
    if disk is not None and wanted.disk > disk:
        raise ConfigError(
            f"the checkpoints of this run need {wanted.disk / GIGA:.1f} GB and {disk / GIGA:.1f} GB are "
            f"free at {place}; name another --out, or choose a smaller model"
        )


def free_memory(device: str) -> int | None:
    """Return the free bytes of the GPU, or of this machine; None if the system does not say."""
    if not _on_cpu(device):
        return int(torch.cuda.mem_get_info()[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kilobytes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(kilobytes[0]) * 1024 if kilobytes else None


def _on_cpu(device: str) -> bool:
    return device == "cpu" or not torch.cuda.is_available()


def _free_disk(place: Path) -> int | None:
    """Return the free bytes where ``place`` will be; None for a file system without a size."""
    there = next(path for path in (place.absolute(), *place.absolute().parents) if path.exists())
    usage = shutil.disk_usage(there)
    return usage.free if usage.total else None
