"""Time rounds on synthetic images, so that the measurement needs no data."""

import gc
import re
import time
from collections import defaultdict
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from semisfl.costs.rounds import ImageFacts, RoundCosts
from semisfl.data.dataset import Dataset
from semisfl.runs.experiment import assemble
from semisfl.settings import config, presets
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
SIDE_CUDA, SIDE_CPU, TIMES = 8192, 1024, 10
KINDS = {
    "BatchNorm": r"^(moments|settle|settle_back|normalise|reduce|to_raw)$|batch_?norm|bn_(fw|bw)",
    "convolution": r"conv|fprop|dgrad|wgrad|implicit_gemm|nhwcAddPadding|ReduceSplitK|^to_",
    "matrix product": r"gemm|nvjet|cutlass|addmm|::mm|bmm|linear|aten::mm",
    "bias, ReLU, pooling": r"^_(forward|backward|back|add_up)$|max_pool|relu|threshold",
    "optimiser, moving average": r"^_sgd$|^_ema$|multi_tensor_apply|fused_sgd|lerp",
    "copies and casts": r"copy|Cat|cat|Memcpy|Memset|aten::to|clone|contiguous",
}


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
        if device.startswith("cuda"):
            # Captured graphs keep their memory until their reference cycles are collected.
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._left = torch.cuda.memory_allocated()
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

    def median(self, most: int) -> float:
        """Return the median seconds of at most so many rounds, fewer if they are long."""
        seconds = self.rounds(1)
        while len(seconds) < most and sum(seconds) < SECONDS_OF_ROUNDS:
            seconds += self.rounds(1)
        return median(seconds)

    def measured(self, most: int) -> dict[str, Any]:
        """Return seconds per round, the arithmetic they contain per second, and start-up time."""
        seconds = self.median(most)
        data = self.data
        unlabeled = len(data.images) - self._options.data.labeled
        work = round_operations(self._options, data.shape, len(data.classes), unlabeled)
        numbers: dict[str, Any] = {
            "seconds_a_round": seconds,
            "tflops": work / seconds / 1e12,
            "start_up_seconds": self.start_up,
        }
        if self.experiment.hardware.device.type == "cuda":
            numbers["peak_gib"] = self.peak_gib
        return numbers

    @property
    def peak_gib(self) -> float:
        """Return the peak of device memory, minus what was in use before."""
        return (torch.cuda.max_memory_allocated() - self._left) / 2**30

    def kernels(self) -> list["Kernel"]:
        """Return the kernels of one round, the longest first; on a CPU, its operators."""
        cuda = self.experiment.hardware.device.type == "cuda"
        threads = torch.get_num_threads()
        if not cuda:
            # The profiler sees only the thread that starts it.
            torch.set_num_threads(1)
        with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
            self.rounds(1)
        torch.set_num_threads(threads)
        spent = "self_device_time_total" if cuda else "self_cpu_time_total"
        kernels = [Kernel(e.key, getattr(e, spent), e.count) for e in seen.key_averages()]
        return sorted(kernels, key=lambda kernel: -kernel.microseconds)


class Kernel(NamedTuple):
    """All launches of one kernel in a round."""

    name: str
    microseconds: float
    launches: int


def shares(kernels: list[Kernel]) -> dict[str, float]:
    """Return the percentage of time by kind of kernel, the largest first."""
    totals: defaultdict[str, float] = defaultdict(float)
    for kernel in kernels:
        totals[_kind(kernel.name)] += kernel.microseconds
    total = sum(totals.values()) or 1
    longest_first = sorted(totals.items(), key=lambda kind: -kind[1])
    return {name: 100 * spent / total for name, spent in longest_first}


def _kind(name: str) -> str:
    return next(
        (kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "everything else"
    )


def matrix_product(device: torch.device) -> float:
    """Return the TFLOP/s of a large matrix product in the training type: bf16 on a GPU, fp32 on a CPU."""
    cuda = device.type == "cuda"
    side, dtype = (SIDE_CUDA, torch.bfloat16) if cuda else (SIDE_CPU, torch.float32)
    one, other = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(3 + TIMES):
        started = time.perf_counter()
        torch.mm(one, other)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return 2 * side**3 / median(seconds[3:]) / 1e12
