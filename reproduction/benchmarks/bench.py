"""``python -m reproduction bench``: seconds per round by preset and method, and how they grow with the clients."""

import os
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from reproduction.benchmarks.timed_rounds import (
    ALL_CONTRIBUTE,
    WARMUP_ROUNDS,
    Timed,
    matrix_product,
    settings,
    shares,
    synthetic,
)
from semisfl.costs.cuts import cut_of
from semisfl.engine.hardware import Hardware
from semisfl.fleet.base import SplitRound
from semisfl.models.build import build_model
from semisfl.runs.directory import environment
from semisfl.runs.experiment import assemble
from semisfl.settings.catalog import DATA, METHODS
from semisfl.settings.config import Config

# On a CPU a round at the paper's settings takes half a minute.
FEWER_STEPS = {"svhn": ("clients.steps=5", "server.steps=10")}
# Client steps of the two short rounds from which a CPU's whole rounds are extrapolated.
SHORT, LONGER = 1, 4
MOST_IMAGES = 50_000
ON_GPU, ON_CPU = ("cifar10", "svhn", "stl10", "image100"), ("digits", "svhn")


def rounds_of_methods(
    device: str, names: Sequence[str], counted: int, quick: bool, product: float
) -> list[dict[str, Any]]:
    """Time every method with every preset; ``product`` is the speed of `matrix_product`."""
    rows = []
    for preset in names:
        known = DATA[preset]
        for method in METHODS if not quick else ("semisfl", "supervised"):
            fewer = () if device.startswith("cuda") else FEWER_STEPS.get(preset, ())
            options = settings(
                preset, f"method={method}", "server.pretrain_rounds=0", *ALL_CONTRIBUTE, *fewer
            )
            timed = Timed(options, known.shape, device, _images(preset), known.classes)
            measured = timed.measured(counted)
            row = {"preset": preset, "method": method, "steps": options.clients.steps, **measured}
            row["share_of_matrix_product_percent"] = 100 * row["tflops"] / product
            if method == "semisfl":
                row["shares_percent"] = shares(timed.kernels())
            rows.append(row)
            del timed
    return rows


def _images(preset: str) -> int:
    return min(DATA[preset].images or MOST_IMAGES, MOST_IMAGES)


def seconds_per_round(preset: str, method: str, device: str) -> float:
    """Return the seconds of a preset's round. A CPU takes minutes for one: extrapolate from short rounds."""
    base = preset.split("+")[0]
    config = settings(preset, f"method={method}", *ALL_CONTRIBUTE)

    def measured(options: Config, counted: int) -> float:
        known = DATA[base]
        timed = Timed(options, known.shape, device, _images(base), known.classes)
        return median(timed.rounds(counted))

    steps, supervised = config.clients.steps, config.server.steps
    if device.startswith("cuda") or steps <= LONGER:
        return measured(config, 3)
    few, more = (
        measured(
            settings(
                preset,
                *(f"method={method}", *ALL_CONTRIBUTE, f"clients.steps={count}"),
                f"server.steps={max(1, supervised * count // steps)}",
            ),
            1,
        )
        for count in (SHORT, LONGER)
    )
    return extrapolated((SHORT, few), (LONGER, more), steps)


def extrapolated(few: tuple[int, float], more: tuple[int, float], steps: int) -> float:
    """Return the seconds of a round with ``steps`` on the line through two shorter rounds; it never falls."""
    slope = max(0.0, (more[1] - few[1]) / (more[0] - few[0]))
    return more[1] + slope * (steps - more[0])


def growth(device: str) -> list[dict[str, Any]]:
    """Return a GPU's memory for cifar10 by the total number of clients, and its time by that of active ones."""
    rows = []
    for total, active in ((10, 10), (100, 10), (1000, 10), (100, 20), (100, 40), (100, 80)):
        timed = Timed(
            settings("cifar10", f"clients.total={total}", f"clients.active={active}"),
            DATA["cifar10"].shape,
            device,
        )
        seconds = median(timed.rounds(3))
        numbers = {"seconds_a_round": seconds, "peak_gib": timed.peak_gib}
        rows.append({"clients": total, "active": active, **numbers})
        del timed
    return rows


def timings(
    device: str = "auto", quick: bool = False, presets: Sequence[str] = ()
) -> dict[str, Any]:
    """Return all timings; ``quick`` leaves out the baselines and the growth with the clients."""
    chosen = Hardware(device).device
    cuda = chosen.type == "cuda"
    names = presets or (ON_GPU if cuda else ON_CPU)
    counted, product = 5 if cuda else 3, matrix_product(chosen)
    result: dict[str, Any] = {
        "environment": environment(str(chosen)),
        "matrix_product_tflops": product,
        "rounds": rounds_of_methods(str(chosen), names, counted, quick, product),
    }
    if cuda and not quick and not presets:
        result["growth"] = growth(str(chosen))
    return result


# --- one client --------------------------------------------------------------------------------------

CLIENT_STEPS, CLIENT_IMAGES, CLIENT_ROUNDS = 5, 500, 3


def client_gflops(preset: str, device: str) -> float:
    """Return the GFLOP/s of this machine as one client of ``preset``, in split rounds without a network.

    The time includes augmentation, which the operations leave out, as the virtual clock expects.
    """
    known = DATA[preset]
    alone = ("clients.total=1", "clients.active=1", f"clients.steps={CLIENT_STEPS}")
    options = settings(preset, "data.labeled=10", *alone)
    model = build_model(options, known.shape, known.classes, projector="none")
    data = synthetic(known.shape, CLIENT_IMAGES, tests=known.classes, classes=known.classes)
    experiment = assemble(options, data, device=device)
    fleet, place = experiment.fleet, experiment.hardware.device
    bottom = {name: tensor.to(place) for name, tensor in model.bottom.state_dict().items()}
    seconds = []
    for index in range(WARMUP_ROUNDS + CLIENT_ROUNDS):
        started = time.perf_counter()
        lr = options.optimizer.lr
        fleet.start_round(SplitRound(index, (0,), CLIENT_STEPS, lr, bottom, bottom))
        for _ in range(CLIENT_STEPS):
            fleet.backward(torch.zeros_like(fleet.forward().student))
        fleet.finish_round()
        if place.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    # Forward and backward of the student, forward of the teacher.
    passes = 4 * CLIENT_STEPS * options.clients.batch
    flops = passes * cut_of(options, known.shape, known.classes).bottom_flops
    return float(flops / median(seconds[WARMUP_ROUNDS:]) / 1e9)


def client_profile(preset: str, device: str) -> str:
    """Return the TOML of a profile whose only device is this machine."""
    place = Hardware(device).device
    numbers = (
        f"gflops = {client_gflops(preset, device):.3f}, memory_gb = {_memory(place) / 1e9:.1f}"
    )
    return (
        f'[measured]\nabout = "measured as a client of {preset}, on {place}"\n'
        "# The server was not measured: this is the assumption of jetson-mix.\n"
        f'server_gflops = 11600\ndevices = [{{ name = "this device", {numbers} }}]'
    )


def _memory(device: torch.device) -> int:
    """Return the total memory in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
