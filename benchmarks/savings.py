"""Measure what codecs and `wire.teacher_once` cost in accuracy and save in bytes: SemiSFL on the embedded digits.

    python -m benchmarks.savings FILE.jsonl [--seeds N] [--rounds N]

One line per run; those that are in the file already are not repeated. As in the paper's experiments 30
clients hold the images, so that one draws each of its images about twice in a round; three are active, with
batches of half the preset's size and twice its steps, so that a run takes half a minute of one core.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from semisfl.runs.start import train
from semisfl.settings import config, presets

CODED = ("student_features", "teacher_features", "gradients", "models")
SETTINGS = (
    *("clients.total=30", "clients.active=3", "clients.batch=16", "clients.steps=20"),
    "server.batch=16",
)
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "int8": dict.fromkeys(CODED, "int8"),
    "int4": dict.fromkeys(CODED, "int4"),
    "fp32, teacher features once": {"teacher_once": True},
}


def run(variant: str, seed: int, rounds: int) -> dict[str, Any]:
    values = presets.values_of("digits") | {"seed": seed, "rounds": rounds}
    changed = config.override(values, [*SETTINGS, f"runtime.evaluate_every={rounds}"])
    result = train(config.parse(changed | {"wire": VARIANTS[variant]}), device="cpu")
    last = result.rounds[-1]
    return {
        "variant": variant,
        "seed": seed,
        "rounds": rounds,
        "accuracy": round(result.accuracy, 2),
        "mask_rate": round(last["mask_rate"], 4),
        "bytes_total": last["bytes_total"],
        "bytes": last["bytes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    lines = options.file.read_text().splitlines() if options.file.exists() else []
    done = {(row["variant"], row["seed"], row["rounds"]) for row in map(json.loads, lines)}
    for seed in range(options.seeds):
        for variant in VARIANTS:
            if (variant, seed, options.rounds) not in done:
                line = json.dumps(run(variant, seed, options.rounds))
                with open(options.file, "a") as file:
                    file.write(line + "\n")
                print(line, flush=True)


if __name__ == "__main__":
    main()
