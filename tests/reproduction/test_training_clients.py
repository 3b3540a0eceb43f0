"""The benchmark of many training clients, small: nobody and nothing is lost when some die."""

import json
import sys

import pytest

from tests import processes


@pytest.mark.timeout(600)
def test_clients_that_die_and_return_cost_no_round() -> None:
    sizes = {"clients": 15, "active": 6, "rounds": 2, "dying": 0.2}
    options = [f"--{name}={value}" for name, value in sizes.items()]
    command = [sys.executable, "-m", "reproduction.benchmarks.training_clients", *options]
    done = processes.run(command, timeout=500)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert {name: result[name] for name in sizes} == sizes
    assert result["rounds_lost"] == result["rounds_repeated"] == 0
    assert result["died"] == result["returned"] == 2 * 3 and result["everybody_back"]
    assert result["strikes"] == result["shut_out"] == 0
    assert result["round_seconds_median"] > 0 and result["server_megabytes_peak"] > 0
