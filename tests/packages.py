"""Packages beside this one: importable, and forgotten afterwards."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "fedavg_fixmatch"
PLACE = "fedavg_fixmatch.method:FedAvgFixMatch"


@contextmanager
def imported_anew(*packages: str) -> Iterator[None]:
    """Forget afterwards what was imported of ``packages`` meanwhile."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] in packages:
            del sys.modules[name]
