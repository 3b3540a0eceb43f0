"""Seconds per round of single presets, models and methods on few synthetic images: `semisfl bench`, in parts.

python -m benchmarks.rounds stl10 cifar10:resnet18 cifar10::fedswitch --images 3000
"""

import argparse
import json

import torch

from semisfl.catalog import DATA
from semisfl.engine.hardware import Hardware
from semisfl.runs import bench
from semisfl.runs.round_work import matrix_product, round_operations

LABELED = 1000


def timed(item: str, device: torch.device, images: int, counted: int) -> dict[str, object]:
    """``item``: a preset, the name of another model after a colon, a method after one more."""
    preset, model, method = (*item.split(":"), "", "")[:3]
    known = DATA[preset]
    options = bench.settings(
        preset,
        f"method={method or 'semisfl'}",
        f"data.labeled={LABELED}",
        "server.pretrain_rounds=0",
        *bench.ALL_CONTRIBUTE,
        *([f"model.name={model}"] if model else []),
    )
    run = bench.Timed(options, known.shape, str(device), images, known.classes)
    seconds = run.median(counted)
    work = round_operations(options, known.shape, known.classes, images - LABELED)
    row: dict[str, object] = {
        "item": item,
        "seconds_a_round": seconds,
        "tflops": work / seconds / 1e12,
        "start_up_seconds": run.start_up,
    }
    if device.type == "cuda":
        row["peak_gib"] = run.peak_gib
    return {**row, "shares_percent": run.shares()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("items", nargs="+")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    device = Hardware(given.device).device
    print(json.dumps({"matrix_product_tflops": matrix_product(device)}), flush=True)
    for item in given.items:
        print(json.dumps(timed(item, device, given.images, given.rounds)), flush=True)


if __name__ == "__main__":
    main()
