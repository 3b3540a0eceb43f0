"""A run's directory: its configuration, environment, metrics, log and checkpoints."""

import contextlib
import errno
import json
import logging
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from semisfl import __version__, config
from semisfl.config import Config
from semisfl.runs import checkpoint
from semisfl.toml import to_toml

log = logging.getLogger(__name__)


class RunDirectory:
    """Files are only ever added or replaced whole; a failed write is said and does not end the run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unwritten: list[str] = []
        self._unsaved: set[str] = set()

    @property
    def unsaved(self) -> list[str]:
        """What the disk refused and nothing later replaced."""
        return sorted(self._unsaved | ({"metrics.jsonl"} if self._unwritten else set()))

    @classmethod
    def create(cls, path: Path, run_config: Config) -> "RunDirectory":
        """A new directory; never one that holds a run already."""
        taken = (
            f"{path} already holds a run; choose another --out, or continue it with --resume {path}"
        )
        if (path / "config.toml").exists():
            raise ValueError(taken)
        try:
            path.mkdir(parents=True, exist_ok=True)
            # "x": of two runs started at once, one is refused.
            with open(path / "config.toml", "x", encoding="utf-8") as file:
                file.write(to_toml(run_config))
            (path / "environment.json").write_text(
                json.dumps(environment(), indent=2) + "\n", encoding="utf-8"
            )
        except FileExistsError as error:
            raise ValueError(
                taken if path.is_dir() else f"{path} is a file; choose another --out"
            ) from error
        except OSError as error:
            raise ValueError(
                f"cannot write to {path}: {error.strerror or error}; choose another --out"
            ) from error
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        if not (path / "config.toml").is_file():
            raise ValueError(
                f"{path} holds no run (no config.toml); --resume wants a run's directory"
            )
        return cls(path)

    def config(self) -> Config:
        return config.parse(config.read(self.path / "config.toml"))

    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.path / "metrics.jsonl")

    def keep_metrics_before(self, round_index: int) -> list[dict[str, Any]]:
        """Drop the lines of rounds that a resumed run is going to repeat."""
        rows = [row for row in self.metrics() if row["round"] < round_index]
        temporary = self.path / ".metrics.tmp"
        try:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            os.replace(temporary, self.path / "metrics.jsonl")
        except OSError as error:
            raise ValueError(
                f"cannot write to {self.path}: {error.strerror or error}; make room or allow it, then --resume again"
            ) from error
        return rows

    def append(self, row: dict[str, Any]) -> None:
        """One line of metrics; lines a full disk refuses are kept and tried again with the next."""
        self._unwritten.append(json.dumps(row) + "\n")
        try:
            _append_whole(self.path / "metrics.jsonl", "".join(self._unwritten).encode())
            self._unwritten.clear()
        except OSError as error:
            log.warning("cannot write metrics to %s: %s; will try again", self.path, error)

    def save(self, name: str, state: dict[str, Any]) -> bool:
        """Write checkpoint ``name``; False, and the previous one is kept, if the disk refuses."""
        try:
            checkpoint.write(self.path / f"{name}.safetensors", state)
        except OSError as error:
            log.warning("cannot write checkpoint %s: %s; the previous one is kept", name, error)
            self._unsaved.add(f"{name}.safetensors")
            return False
        self._unsaved.discard(f"{name}.safetensors")
        return True

    def load(self, name: str = "latest") -> dict[str, Any]:
        return checkpoint.read(self.path / f"{name}.safetensors")

    def log_to_file(self) -> logging.Handler:
        handler = logging.FileHandler(self.path / "run.log", encoding="utf-8")
        formatter = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%SZ")
        formatter.converter = time.gmtime
        handler.setFormatter(formatter)
        return handler


def _append_whole(path: Path, data: bytes) -> None:
    """All of ``data`` or nothing: half a line would spoil the next one too."""
    with open(path, "ab", buffering=0) as file:
        start = file.tell()
        try:
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(start)
            raise


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; a last line cut off by a crash is left out."""
    if not path.is_file():
        return []
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            log.warning("%s: line %d is not JSON and is left out", path, number)
    return rows


def environment() -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "semisfl": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "gpu": gpu,
    }
