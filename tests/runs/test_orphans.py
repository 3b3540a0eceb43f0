"""Runs of a pool end with the process that started them, however it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

POOL = """
import os, signal, sys
from pathlib import Path
from semisfl.runs.compare import list_jobs
from semisfl.runs.compare import Processes

folder = Path(sys.argv[1])
pool = Processes(1, "cpu")
sys.executable = str(folder / "run")
pool.start(list_jobs({}, ["supervised"], 1, folder)[0])
while not (folder / "pid").exists() or not (folder / "pid").read_text().endswith("\\n"):
    pass
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_runs_end_cleanly_when_their_pool_is_killed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.write_text(
        f"#!/bin/sh\ntrap 'echo stopped > {tmp_path}/end; exit' TERM\necho $$ > {tmp_path}/pid\n"
        "while :; do sleep 0.1; done\n"
    )
    run.chmod(0o755)
    pool = subprocess.run([sys.executable, "-c", POOL, str(tmp_path)], timeout=120)
    assert pool.returncode == -signal.SIGKILL
    end = time.monotonic() + 30
    while not (tmp_path / "end").exists() and time.monotonic() < end:
        time.sleep(0.05)
    if not (tmp_path / "end").exists():
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert (tmp_path / "end").exists(), "the run went on"
