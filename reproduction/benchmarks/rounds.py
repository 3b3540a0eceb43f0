"""Time rounds of presets, models and methods on synthetic images, and this machine as one client.

    python -m reproduction bench stl10 cifar10:resnet18 cifar10::fedswitch --images 3000

Every item has a process of its own. They start up side by side, which takes longest, and are timed one after another,
while the others wait.
"""

import gc
import multiprocessing
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
from torch.utils.benchmark import Timer

from semisfl.costs.cuts import cut_of
from semisfl.costs.rounds import ImageFacts, RoundCosts
from semisfl.data.dataset import Dataset
from semisfl.engine.hardware import Hardware
from semisfl.fleet.base import SplitRound, State
from semisfl.runs.directory import environment
from semisfl.runs.experiment import assemble
from semisfl.settings import config, presets
from semisfl.settings.catalog import DATA, METHODS
from semisfl.settings.config import Config

# The first rounds compile, choose convolution algorithms and capture steps.
WARMUP_ROUNDS = 2
# With a threshold of zero every client contributes, as late in training.
ALL_CONTRIBUTE = tuple(
    f"{name}.confidence_threshold=0" for name in ("semifl", "fedmatch", "fedswitch")
)
# A round of the largest model takes seconds, so a few rounds are enough.
SECONDS_OF_ROUNDS = 10.0
# Large enough for a GPU's full speed, small enough for a CPU.
SIDE_CUDA, SIDE_CPU = 8192, 1024


def synthetic(shape: tuple[int, int, int], images: int, tests: int, classes: int = 10) -> Dataset:
    """Return noise in place of images: their content does not change the time."""
    source = torch.Generator().manual_seed(0)

    def noise(count: int) -> torch.Tensor:
        return torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=source)

    return Dataset(
        name="synthetic",
        classes=tuple(str(number) for number in range(classes)),
        images=noise(images),
        labels=torch.arange(images) % classes,
        test_images=noise(tests),
        test_labels=torch.arange(tests) % classes,
        mean=(0.5,) * shape[0],
        std=(0.25,) * shape[0],
    )


def settings(preset: str, *changes: str) -> Config:
    """Return a preset with changes, and with images dealt evenly to the clients."""
    return config.parse(
        config.override(presets.values_of(preset), ["data.partition.kind=iid", *changes])
    )


def round_operations(
    options: Config, shape: tuple[int, int, int], classes: int, images: int
) -> float:
    """Return the floating-point operations of a usual round; ``images`` are those of all clients."""
    facts = ImageFacts(shape, classes, images / options.clients.total)
    work = RoundCosts.of(options, facts).usual_work(range(options.clients.active))
    shares = [share for phase in work.phases for share in phase]
    return work.server + sum(
        share.before + share.steps * (share.forward + share.backward + share.server)
        for share in shares
    )


class Timed:
    """A method on synthetic images whose rounds are timed. Making one runs the rounds that warm up."""

    def __init__(
        self,
        options: Config,
        shape: tuple[int, int, int],
        device: str,
        images: int = 50_000,
        classes: int = 10,
    ) -> None:
        # The captured graphs of a method before keep their memory until their reference cycles are collected.
        gc.collect()
        self.data = synthetic(shape, images, tests=max(1000, classes), classes=classes)
        self._options = options
        made = time.perf_counter()
        self.experiment = assemble(options, self.data, device=device)
        self.index = 0
        self.rounds(1)
        self.start_up = time.perf_counter() - made
        self.rounds(WARMUP_ROUNDS - 1)

    def rounds(self, count: int) -> list[float]:
        """Run so many rounds and return the seconds of each."""
        seconds = []
        for _ in range(count):
            started = time.perf_counter()
            self.experiment.method.round(self.index)
            if self.experiment.hardware.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
            self.index += 1
        return seconds

    def measured(self, most: int) -> dict[str, Any]:
        """Return the median seconds of at most so many rounds, their arithmetic per second, and start-up time."""
        times = self.rounds(1)
        while len(times) < most and sum(times) < SECONDS_OF_ROUNDS:
            times += self.rounds(1)
        seconds, data = median(times), self.data
        unlabeled = len(data.images) - self._options.data.labeled
        work = round_operations(self._options, data.shape, len(data.classes), unlabeled)
        numbers: dict[str, Any] = {
            "seconds_a_round": seconds,
            "tflops": work / seconds / 1e12,
            "start_up_seconds": self.start_up,
        }
        if self.experiment.hardware.device.type == "cuda":
            numbers["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return numbers


def matrix_product(device: torch.device) -> float:
    """Return the TFLOP/s of a large matrix product in the training type: bf16 on a GPU, fp32 on a CPU."""
    cuda = device.type == "cuda"
    side, dtype = (SIDE_CUDA, torch.bfloat16) if cuda else (SIDE_CPU, torch.float32)
    one, other = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    timer = Timer(
        "torch.mm(one, other)",
        globals={"torch": torch, "one": one, "other": other},
        num_threads=torch.get_num_threads(),
    )
    return 2 * side**3 / timer.blocked_autorange().median / 1e12


# --- items in turn -----------------------------------------------------------------------------

LABELED = 1000
ON_GPU, ON_CPU = ("cifar10", "svhn", "stl10", "image100"), ("digits", "svhn")
FEWER_STEPS = ("clients.steps=5", "server.steps=10")
"""On a CPU a round at the paper's settings takes half a minute; the digits keep their own steps."""


def measure(
    items: Sequence[str] | None, device: str, images: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield the environment with the speed of a large matrix product, then one measurement per item.

    Args:
        items: ``preset``, ``preset:model``, ``preset:model:method`` or ``frozen:model``, which compares a frozen bottom
            with plain loops; None: every method on the presets that this machine can train.
        device: where to train, as for `semisfl run`.
        images: the number of synthetic images.
        rounds: rounds that are timed, after those that warm up; fewer if they are long.
    """
    device = str(Hardware(device).device)
    presets = ON_GPU if device.startswith("cuda") else ON_CPU
    context = multiprocessing.get_context("spawn")
    waiting = {}
    for item in items or [f"{preset}::{method}" for preset in presets for method in METHODS]:
        here, there = context.Pipe()
        work = (item, device, images, rounds, there)
        context.Process(target=_in_turn, args=work, daemon=True).start()
        waiting[item] = here
    started = {item: turn.recv() for item, turn in waiting.items()}
    product = matrix_product(torch.device(device))
    yield {"environment": environment(device), "matrix_product_tflops": product}
    for item, answer in started.items():
        if answer == "ready":
            waiting[item].send("go")
            answer = waiting[item].recv()
        if "tflops" in answer:
            answer["share_of_matrix_product_percent"] = 100 * answer["tflops"] / product
        yield answer


def timed(item: str, device: str, images: int, rounds: int, turn: Connection) -> dict[str, Any]:
    """Return one measurement, made once ``turn`` says so; the arguments are those of `measure`."""
    preset, model, method = (*item.split(":"), "", "")[:3]
    known = DATA[preset]
    fewer = preset != "digits" and not device.startswith("cuda")
    chosen = settings(
        preset,
        f"method={method or 'semisfl'}",
        f"data.labeled={LABELED}",
        "server.pretrain_rounds=0",
        *ALL_CONTRIBUTE,
        *([f"model.name={model}"] if model else []),
        *(FEWER_STEPS if fewer else ()),
    )
    run = Timed(chosen, known.shape, device, images, known.classes)
    turn.send("ready")
    turn.recv()
    return {"item": item, "steps": chosen.clients.steps, **run.measured(rounds)}


def _in_turn(item: str, device: str, images: int, rounds: int, turn: Connection) -> None:
    from reproduction.benchmarks import frozen

    measured = frozen.timed if item.startswith("frozen") else timed
    try:
        turn.send(measured(item, device, images, rounds, turn))
    except Exception as reason:
        traceback.print_exc()
        turn.send({"item": item, "failed": str(reason)})


# --- whole rounds, and one client --------------------------------------------------------------

FEW = 4
"""Client steps of the short round from which a CPU's whole rounds are estimated."""
MOST_IMAGES = 50_000
"""Synthetic images in place of a data set whose size is not known."""
CLIENT_STEPS, CLIENT_IMAGES, CLIENT_ROUNDS = 5, 500, 3


def seconds_per_round(preset: str, method: str, device: str) -> float:
    """Return the seconds of a preset's round; on a CPU, which takes minutes for one, those of `FEW` steps scaled up."""
    usual = settings(preset, f"method={method}", *ALL_CONTRIBUTE)
    steps, known = usual.clients.steps, DATA[preset.split("+")[0]]
    few = steps if device.startswith("cuda") else min(steps, FEW)
    supervised = max(1, usual.server.steps * few // steps)
    changes = (f"clients.steps={few}", f"server.steps={supervised}")
    short = settings(preset, f"method={method}", *ALL_CONTRIBUTE, *changes)
    timed = Timed(short, known.shape, device, known.images or MOST_IMAGES, known.classes)
    return median(timed.rounds(3)) * steps / few


def client_gflops(preset: str, device: str) -> float:
    """Return the GFLOP/s of this machine as one client of ``preset``, in split rounds without a network.

    The time includes augmentation, which the operations leave out, as the virtual clock expects.
    """
    known = DATA[preset]
    alone = ("clients.total=1", "clients.active=1", f"clients.steps={CLIENT_STEPS}")
    options = settings(preset, "data.labeled=10", *alone)
    data = synthetic(known.shape, CLIENT_IMAGES, tests=known.classes, classes=known.classes)
    experiment = assemble(options, data, device=device)
    fleet, place = experiment.fleet, experiment.hardware.device
    bottom: State = experiment.method.student.bottom.state_dict()  # type: ignore[attr-defined]
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
    memory = (
        torch.cuda.get_device_properties(place).total_memory
        if place.type == "cuda"
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    numbers = f"gflops = {client_gflops(preset, device):.3f}, memory_gb = {memory / 1e9:.1f}"
    return (
        f'[measured]\nabout = "measured as a client of {preset}, on {place}"\n'
        "# The server was not measured: this is the assumption of jetson-mix.\n"
        f'server_gflops = 11600\ndevices = [{{ name = "this device", {numbers} }}]'
    )
