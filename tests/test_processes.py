"""Processes that tests start end with the tests, however these end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

TESTS = """
import subprocess, sys, time
from tests import processes

SLEEP = "import time; time.sleep(600)"
START = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); {SLEEP}"
with processes.guarded():
    one = subprocess.Popen([sys.executable, "-c", START], start_new_session=True)
    print(one.pid, flush=True)
    time.sleep(600)
"""


def running(pids: list[int]) -> list[int]:
    """Return those of the processes that have not ended; a zombie has."""
    stats = {pid: Path(f"/proc/{pid}/stat") for pid in pids}
    return [pid for pid, stat in stats.items() if stat.exists() and " Z " not in stat.read_text()]


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_killed_pytest_leaves_no_process_behind() -> None:
    command = [sys.executable, "-c", TESTS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        one = int(tests.stdout.readline())
        end = time.monotonic() + 30
        while not children(one):
            assert time.monotonic() < end
            time.sleep(0.05)
        started = [one, *children(one)]
        os.kill(tests.pid, signal.SIGKILL)
        while running(started):
            assert time.monotonic() < end, "they live on"
            time.sleep(0.05)
