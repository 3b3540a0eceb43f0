"""Let the processes of several runs share one GPU, through CUDA's multi-process service (MPS).

Without it the GPU serves one process at a time, and small models leave most of it idle.
"""

import os
import shutil
import subprocess
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
SECONDS_TO_ANSWER = 10


class SharedGPU:
    """CUDA's MPS daemon for the time of a pool; does nothing where it is not installed or runs already."""

    def __init__(self, folder: Path, device: str) -> None:
        self.environment: dict[str, str] = {}
        """Variables of the environment by which processes use the daemon; empty if there is none."""
        if device == "cpu" or "CUDA_MPS_PIPE_DIRECTORY" in os.environ or not shutil.which(CONTROL):
            return
        places = {
            "CUDA_MPS_PIPE_DIRECTORY": str(folder / "mps"),
            "CUDA_MPS_LOG_DIRECTORY": str(folder / "mps-log"),
        }
        for place in places.values():
            Path(place).mkdir()
        if _control(["-d"], places):
            self.environment = places

    def stop(self) -> None:
        """End the daemon, after the processes that use it."""
        if self.environment:
            _control([], self.environment, "quit\n")
            self.environment = {}


def _control(words: list[str], places: dict[str, str], say: str = "") -> bool:
    """Call the daemon's program; return whether it succeeded. Runs go on without it, only more slowly."""
    try:
        done = subprocess.run(
            [CONTROL, *words],
            input=say,
            env={**os.environ, **places},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=SECONDS_TO_ANSWER,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
