"""Measure how fast this machine computes as one client, for the profiles of plans and replays."""

import os
import time
from statistics import median
from typing import Any

import torch

from semisfl.costs.cuts import cut_of
from semisfl.costs.timed_rounds import WARMUP_ROUNDS, settings, synthetic
from semisfl.fleet.base import SplitRound
from semisfl.models.build import build_model
from semisfl.runs.experiment import assemble
from semisfl.settings.catalog import DATA

CLIENT_STEPS, CLIENT_IMAGES, CLIENT_ROUNDS = 5, 500, 3


def client_speed(preset: str, device: str) -> dict[str, Any]:
    """Return the GFLOP/s of this machine as one client of ``preset``, in split rounds without a network.

    The time includes augmentation, which the operations leave out, as the virtual clock expects.
    """
    known = DATA[preset]
    alone = ("clients.total=1", "clients.active=1", f"clients.steps={CLIENT_STEPS}")
    options = settings(preset, "data.labeled=10", *alone)
    model = build_model(options, known.shape, known.classes, projector="none")
    data = synthetic(known.shape, CLIENT_IMAGES, tests=known.classes, classes=known.classes)
    experiment = assemble(options, data, device=device)
    fleet, cuda = experiment.fleet, experiment.hardware.device.type == "cuda"
    bottom = {
        name: tensor.to(experiment.hardware.device)
        for name, tensor in model.bottom.state_dict().items()
    }
    seconds = []
    for index in range(WARMUP_ROUNDS + CLIENT_ROUNDS):
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
    flops = (
        4
        * CLIENT_STEPS
        * options.clients.batch
        * cut_of(options, known.shape, known.classes).bottom_flops
    )
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
    """Return the total memory in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
