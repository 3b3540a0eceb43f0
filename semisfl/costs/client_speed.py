"""How fast this machine is as one client: what plans and virtual clocks take for a device."""

import os
import time
from statistics import median
from typing import Any

import torch

from semisfl.costs.bench import WARMUP_ROUNDS, settings, synthetic
from semisfl.costs.round_work import operations
from semisfl.fleet.base import SplitRound
from semisfl.models.split import build_model
from semisfl.runs.experiment import assemble
from semisfl.settings.catalog import DATA

CLIENT_STEPS, CLIENT_IMAGES = 5, 500


def client_speed(preset: str, device: str = "auto", counted: int = 3) -> dict[str, Any]:
    """What this machine sustains as one client of ``preset``: split rounds without server and network.

    Augmentation is timed too, which the operations leave out, as the virtual clock wants it.
    """
    row = DATA[preset]
    alone = ("clients.total=1", "clients.active=1", f"clients.steps={CLIENT_STEPS}")
    options = settings(preset, "data.labeled=10", *alone)
    model = build_model(options, row.shape, row.classes, projector="none")
    data = synthetic(row.shape, CLIENT_IMAGES, tests=row.classes, classes=row.classes)
    experiment = assemble(options, data, device=device)
    fleet, cuda = experiment.fleet, experiment.hardware.device.type == "cuda"
    bottom = {
        name: tensor.to(experiment.hardware.device)
        for name, tensor in model.bottom.state_dict().items()
    }
    seconds = []
    for index in range(WARMUP_ROUNDS + counted):
        started = time.perf_counter()
        lr = options.optimizer.lr
        fleet.start_round(SplitRound(index, (0,), CLIENT_STEPS, lr, bottom, bottom))
        for _ in range(CLIENT_STEPS):
            fleet.backward(torch.zeros_like(fleet.forward().student))
        fleet.finish_round()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    spent = median(seconds[WARMUP_ROUNDS:])
    # Forward and backward of the student, forward of the teacher.
    flops = 4 * CLIENT_STEPS * options.clients.batch * operations(model.bottom, row.shape)
    return {
        "preset": preset,
        "model": options.model.name,
        "batch": options.clients.batch,
        "device": str(experiment.hardware.device),
        "seconds_an_iteration": spent / CLIENT_STEPS,
        "gflops": flops / spent / 1e9,
        "memory_gb": _memory(experiment.hardware.device) / 1e9,
    }


def _memory(device: torch.device) -> int:
    """Bytes there are in all."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
