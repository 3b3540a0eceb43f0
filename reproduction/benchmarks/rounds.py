"""Measure seconds per round of single presets, models and methods on few synthetic images.

python -m reproduction.benchmarks.rounds stl10 cifar10:resnet18 cifar10::fedswitch --images 3000

Every item has a process of its own. They start up side by side, which takes longest, and are timed one after another,
while the others wait.
"""

import argparse
import json
import multiprocessing
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from reproduction.benchmarks import timed_rounds
from reproduction.benchmarks.timed_rounds import matrix_product
from semisfl.engine.hardware import Hardware
from semisfl.settings.catalog import DATA

LABELED = 1000
LONGEST_KERNELS = 45


def timed(item: str, arguments: argparse.Namespace, turn: Connection) -> dict[str, object]:
    """Return one measurement. ``item`` is a preset, or ``preset:model``, or ``preset:model:method``."""
    preset, model, method = (*item.split(":"), "", "")[:3]
    known = DATA[preset]
    options = timed_rounds.settings(
        preset,
        f"method={method or 'semisfl'}",
        f"data.labeled={LABELED}",
        "server.pretrain_rounds=0",
        *timed_rounds.ALL_CONTRIBUTE,
        *([f"model.name={model}"] if model else []),
    )
    run = timed_rounds.Timed(
        options, known.shape, arguments.device, arguments.images, known.classes
    )
    turn.send("ready")
    turn.recv()
    row: dict[str, object] = {"item": item, **run.measured(arguments.rounds)}
    if not arguments.kernels:
        return row
    kernels = run.kernels()
    arguments.kernels.mkdir(parents=True, exist_ok=True)
    name = "-".join(part for part in (preset, model, method) if part)
    (arguments.kernels / f"{name}.txt").write_text(longest(kernels))
    return {**row, "shares_percent": timed_rounds.shares(kernels)}


def longest(kernels: list[timed_rounds.Kernel]) -> str:
    """Return the longest kernels, one line each: share, milliseconds, launches, name."""
    total = sum(kernel.microseconds for kernel in kernels) or 1
    launches = sum(kernel.launches for kernel in kernels)
    lines = [f"kernel seconds {total / 1e6:.4f}, launches {launches}"]
    for name, spent, times in kernels[:LONGEST_KERNELS]:
        share, milliseconds = 100 * spent / total, spent / 1e3
        lines.append(f"{share:5.1f}% {milliseconds:10.2f} ms {times:7d} {name[:150]}")
    return "\n".join(lines) + "\n"


def in_turn(item: str, arguments: argparse.Namespace, turn: Connection) -> None:
    try:
        turn.send(timed(item, arguments, turn))
    except Exception as reason:
        traceback.print_exc()
        turn.send({"item": item, "failed": str(reason)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("items", nargs="+")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--kernels",
        type=Path,
        help="folder for the longest kernels of a round of each item, and where its time goes in the answer",
    )
    arguments = parser.parse_args()
    arguments.device = str(Hardware(arguments.device).device)
    context = multiprocessing.get_context("spawn")
    waiting = {}
    for item in arguments.items:
        here, there = context.Pipe()
        context.Process(target=in_turn, args=(item, arguments, there), daemon=True).start()
        waiting[item] = here
    started = {item: turn.recv() for item, turn in waiting.items()}
    product = matrix_product(torch.device(arguments.device))
    print(json.dumps({"matrix_product_tflops": product}), flush=True)
    for item, answer in started.items():
        if answer == "ready":
            waiting[item].send("go")
            answer = waiting[item].recv()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
