"""Describe the machine and the software that a run's numbers depend on."""

import os
import platform
from typing import Any

import numpy as np
import torch

from semisfl.settings.version import VERSION


def environment(device: str = "auto") -> dict[str, Any]:
    """Return what the numbers of a run on ``device`` may depend on besides its configuration."""
    on_gpu = device != "cpu" and torch.cuda.is_available()
    gpu = torch.cuda.get_device_name(None if device == "auto" else device) if on_gpu else None
    return {
        "semisfl": VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
    }
