"""Timings of this machine, on synthetic images of the right size: anyone can repeat them."""

import gc
import re
import time
from collections import defaultdict
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from semisfl.costs.round_work import matrix_product, round_operations
from semisfl.data.sources import Dataset
from semisfl.runs.experiment import assemble
from semisfl.settings import config, presets
from semisfl.settings.catalog import DATA, METHODS
from semisfl.settings.config import Config

# The first rounds compile, choose convolution algorithms and capture steps.
WARMUP_ROUNDS = 2
# A round at the paper's settings takes a CPU half a minute.
FEWER_STEPS = {"svhn": ("clients.steps=5", "server.steps=10")}
# A threshold of zero lets every client contribute, as it does late in training.
ALL_CONTRIBUTE = tuple(
    f"{name}.confidence_threshold=0" for name in ("semifl", "fedmatch", "fedswitch")
)
# Of the two short rounds from which a CPU's whole ones are worked out: local steps.
SHORT, LONGER = 1, 4
MOST_IMAGES = 50_000
# A round of the largest model takes seconds: so many of them are enough.
SECONDS_OF_ROUNDS = 10.0
KINDS = {
    "BatchNorm": r"^(moments|settle|settle_back|normalise|reduce|to_raw)$|batch_?norm|bn_(fw|bw)",
    "convolution": r"conv|fprop|dgrad|wgrad|implicit_gemm|nhwcAddPadding|ReduceSplitK|^to_",
    "matrix product": r"gemm|nvjet|cutlass|addmm|::mm|bmm|linear|aten::mm",
    "bias, ReLU, pooling": r"^_(forward|backward|back|add_up)$|max_pool|relu|threshold",
    "optimiser, moving average": r"^_sgd$|^_ema$|multi_tensor_apply|fused_sgd|lerp",
    "copies and casts": r"copy|Cat|cat|Memcpy|Memset|aten::to|clone|contiguous",
}


def synthetic(
    shape: tuple[int, int, int], images: int, tests: int = 10_000, classes: int = 10
) -> Dataset:
    """Noise: what it costs does not depend on what it shows."""
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
    return config.parse(
        config.override(presets.values_of(preset), ["data.partition.kind=iid", *changes])
    )


class Timed:
    """A method on synthetic data, some rounds of it timed."""

    def __init__(
        self,
        options: Config,
        shape: tuple[int, int, int],
        device: str,
        images: int = 50_000,
        classes: int = 10,
    ) -> None:
        if device.startswith("cuda"):
            # Recorded graphs keep their memory until the cycles they sit in are collected.
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._left = torch.cuda.memory_allocated()
        self.data = synthetic(shape, images, tests=max(1000, classes), classes=classes)
        made = time.perf_counter()
        self.experiment = assemble(options, self.data, device=device)
        self.index = 0
        self.rounds(1)
        self.start_up = time.perf_counter() - made
        self.rounds(WARMUP_ROUNDS - 1)

    def rounds(self, count: int) -> list[float]:
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
        """Of so many rounds, or of fewer long ones."""
        seconds = self.rounds(1)
        while len(seconds) < most and sum(seconds) < SECONDS_OF_ROUNDS:
            seconds += self.rounds(1)
        return median(seconds)

    @property
    def peak_gib(self) -> float:
        """Device memory at most, less what somebody else had left there."""
        return (torch.cuda.max_memory_allocated() - self._left) / 2**30

    def kernels(self) -> list["Kernel"]:
        """Of one round, those that took longest first; of a CPU, operations."""
        cuda = self.experiment.hardware.device.type == "cuda"
        threads = torch.get_num_threads()
        if not cuda:
            # The profiler sees the thread that starts it, so everything has to happen there.
            torch.set_num_threads(1)
        with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
            self.rounds(1)
        torch.set_num_threads(threads)
        spent = "self_device_time_total" if cuda else "self_cpu_time_total"
        found = [Kernel(e.key, getattr(e, spent), e.count) for e in seen.key_averages()]
        return sorted(found, key=lambda kernel: -kernel.microseconds)


class Kernel(NamedTuple):
    name: str
    microseconds: float
    launches: int


def shares(kernels: list[Kernel]) -> dict[str, float]:
    """Where a device's time goes, in percent."""
    totals: defaultdict[str, float] = defaultdict(float)
    for kernel in kernels:
        totals[_kind(kernel.name)] += kernel.microseconds
    whole = sum(totals.values()) or 1
    longest_first = sorted(totals.items(), key=lambda kind: -kind[1])
    return {name: 100 * spent / whole for name, spent in longest_first}


def _kind(name: str) -> str:
    return next(
        (kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "everything else"
    )


def rounds_of_methods(
    device: str, names: list[str], counted: int, quick: bool, product: float
) -> list[dict[str, Any]]:
    """Seconds per round, method by method, at the preset's settings; ``product``: `matrix_product`."""
    rows = []
    for preset in names:
        known = DATA[preset]
        images = min(known.images or MOST_IMAGES, MOST_IMAGES)
        for method in METHODS if not quick else ("semisfl", "supervised"):
            fewer = () if device.startswith("cuda") else FEWER_STEPS.get(preset, ())
            options = settings(
                preset, f"method={method}", "server.pretrain_rounds=0", *ALL_CONTRIBUTE, *fewer
            )
            timed = Timed(options, known.shape, device, images, known.classes)
            seconds = timed.median(counted)
            unlabeled = images - options.data.labeled
            tflops = (
                round_operations(options, known.shape, known.classes, unlabeled) / seconds / 1e12
            )
            row: dict[str, Any] = {"preset": preset, "method": method, "seconds_a_round": seconds}
            row["steps"] = options.clients.steps
            row["tflops"] = tflops
            row["share_of_matrix_product_percent"] = 100 * tflops / product
            if method == "semisfl":
                row["start_up_seconds"] = timed.start_up
                row["shares_percent"] = shares(timed.kernels())
            if device.startswith("cuda"):
                row["peak_gib"] = timed.peak_gib
            rows.append(row)
            del timed
    return rows


def seconds_per_round(preset: str, method: str, device: str) -> float:
    """Of a preset's own rounds. Of a CPU, which takes minutes for one, worked out from short ones."""
    known = DATA[preset.split("+")[0]]
    images = min(known.images or MOST_IMAGES, MOST_IMAGES)
    whole = settings(preset, f"method={method}", *ALL_CONTRIBUTE)

    def measured(options: Config, counted: int) -> float:
        return median(Timed(options, known.shape, device, images).rounds(counted))

    steps, supervised = whole.clients.steps, whole.server.steps
    if device.startswith("cuda") or steps <= LONGER:
        return measured(whole, 3)
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
    """The seconds of a round with ``steps``, on a line through two shorter ones that does not fall."""
    slope = max(0.0, (more[1] - few[1]) / (more[0] - few[0]))
    return more[1] + slope * (steps - more[0])


def growth(device: str, preset: str, counted: int) -> list[dict[str, Any]]:
    """Memory by the number of clients in total, time by the number of active ones."""
    rows = []
    for total, active in ((10, 10), (100, 10), (1000, 10), (100, 20), (100, 40), (100, 80)):
        timed = Timed(
            settings(preset, f"clients.total={total}", f"clients.active={active}"),
            DATA[preset].shape,
            device,
        )
        row: dict[str, Any] = {
            "clients": total,
            "active": active,
            "seconds_a_round": median(timed.rounds(counted)),
        }
        if device.startswith("cuda"):
            row["peak_gib"] = timed.peak_gib
        rows.append(row)
        del timed
    return rows


def main(device: str = "auto", quick: bool = False) -> dict[str, Any]:
    """All timings; ``quick`` leaves out the baselines and the growth."""
    from semisfl.engine.hardware import Hardware
    from semisfl.runs.directory import environment

    chosen = Hardware(device).device
    cuda = chosen.type == "cuda"
    names = ["cifar10", "svhn", "stl10", "image100"] if cuda else ["digits", "svhn"]
    counted, product = 5 if cuda else 3, matrix_product(chosen)
    result: dict[str, Any] = {
        "environment": environment(),
        "matrix_product_tflops": product,
        "rounds": rounds_of_methods(str(chosen), names, counted, quick, product),
    }
    if cuda and not quick:
        result["growth"] = growth(str(chosen), "cifar10", counted=3)
    return result
