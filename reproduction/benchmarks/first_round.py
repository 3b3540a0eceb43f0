"""Measure the seconds from a process's start to the first round of `semisfl run digits`, and to PyTorch's import.

python -m reproduction.benchmarks.first_round
"""

import json
import subprocess
import sys
import time
from statistics import median
from tempfile import TemporaryDirectory

TIMES = 5
ROUND = """
import os, sys
from semisfl.methods import semisfl
from semisfl.cli.main import main
semisfl.SemiSFL.round = lambda *_: os._exit(0)
main(["run", "digits", "--quiet", "--out", sys.argv[1]])
"""


def seconds(code: str) -> float:
    with TemporaryDirectory() as folder:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code, f"{folder}/run"], check=True)
        return time.perf_counter() - began


def main() -> None:
    timings: dict[str, float] = {"times": TIMES}
    for name, code in (("import_torch", "import torch"), ("first_round", ROUND)):
        timings[name + "_seconds"] = round(median(seconds(code) for _ in range(TIMES)), 2)
    print(json.dumps(timings))


if __name__ == "__main__":
    main()
