"""Compare the in-process fleet with the plain twin (one module and one optimiser per client), in one run.

    python -m reproduction.benchmarks.twin [--rounds N] [--case NAME]...

Both train the same rounds of SemiSFL on the same images, by turns. Prints JSON. Times are of steps alone:
drawing and augmenting images is left out on both sides.
"""

import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import typer

from reproduction.benchmarks import rounds as timing
from semisfl.runs.experiment import assemble
from semisfl.runs.run_data import divide
from semisfl.settings.catalog import DATA
from semisfl.settings.config import Config
from tests.twin import PlainTwin

BATCHNORM = """[
    {kind = "conv", channels = 32, padding = 1}, {kind = "batchnorm"}, {kind = "relu"}, {kind = "pool"},
    {kind = "residual", body = [
        {kind = "conv", channels = 32, padding = 1, bias = false}, {kind = "batchnorm"}, {kind = "relu"},
        {kind = "conv", channels = 32, padding = 1, bias = false}, {kind = "batchnorm"},
    ]},
    {kind = "relu"}, {kind = "pool", size = 4}, {kind = "flatten"},
    {kind = "linear", features = 128}, {kind = "relu"}, {kind = "linear"},
]"""

CASES: dict[str, tuple[str, ...]] = {
    # As the preset, images of 28 x 28 x 1.
    "digits": ("digits",),
    # The paper's CNN on images of CIFAR-10's size, its batches and active clients; fewer steps.
    "cnn-32x32x3": ("svhn", "clients.steps=4", "server.steps=4"),
    # BatchNorm and a residual block at that size: each client has statistics of its own.
    "bn-32x32x3": ("svhn", "clients.steps=4", "server.steps=4", f"model.layers={BATCHNORM}"),
}


def timed(step: Callable[[], None], seconds: list[float]) -> Callable[[], None]:
    def run_step() -> None:
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)

    return run_step


def measure(name: str, rounds: int) -> dict[str, Any]:
    preset, *changes = CASES[name]
    options: Config = timing.settings(preset, *changes)
    data = timing.synthetic(DATA[preset].shape, 5_000, 100)
    experiment = assemble(options, data, device="cpu")
    method: Any = experiment.method
    twin = PlainTwin(options, method.student, data, divide(options, data))
    # All views of a round are made at its start, so that steps hold no augmentation.
    experiment.fleet.block.batches.whole = True  # type: ignore[attr-defined]
    method.labeled._batches.whole = True
    fleet: dict[str, list[float]] = {"supervised": [], "cross_entity": []}
    method.supervised_step = timed(method.supervised_step, fleet["supervised"])
    method.cross_entity_step = timed(method.cross_entity_step, fleet["cross_entity"])
    for index in range(rounds):
        method.round(index)
        twin.round(index)
    clients = options.clients
    phases = {}
    for phase, images in (
        ("supervised", options.server.batch),
        ("cross_entity", clients.active * clients.batch),
    ):
        # The first round warms both up.
        ours = median(fleet[phase][len(fleet[phase]) // rounds :])
        plain = median(twin.seconds[phase][len(twin.seconds[phase]) // rounds :])
        phases[phase] = {
            "fleet_ms": 1e3 * ours,
            "twin_ms": 1e3 * plain,
            "fleet_images_a_second": images / ours,
            "times_faster": plain / ours,
        }
    return phases


def main(rounds: int = 4, case: list[str] | None = None) -> None:
    """Time ROUNDS rounds of each CASE, the first of which only warms up; print JSON."""
    results = {name: measure(name, rounds) for name in case or CASES}
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    typer.run(main)
