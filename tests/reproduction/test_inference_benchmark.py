"""The benchmark of split inference measures what it says it does."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_every_cut_is_measured() -> None:
    command = [
        sys.executable,
        "-m",
        "reproduction.benchmarks.inference",
        "--models",
        "cnn",
        "--images",
        "2",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)["rows"]
    alone, *cuts = rows
    assert (alone["cut"], alone["bytes_up"]) == ("whole on device", 0)
    names = ["conv1", "relu1", "pool1", "conv2", "relu2", "pool2", "flatten", "fc1", "relu_fc1"]
    assert [(row["cut"], row["codec"]) for row in cuts] == [
        (name, codec) for name in names for codec in ("fp32", "int8")
    ]
    for row in cuts:
        payload = row["features"] * (4 if row["codec"] == "fp32" else 1)
        assert payload < row["bytes_up"] < 1.05 * payload + 1000, row
        # The proxy is no faster than it says, whatever else the machine does.
        assert row["4_mbit"]["fastest_ms"] > 1e3 * payload / (4e6 / 8), row
