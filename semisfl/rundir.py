"""A run's directory: its configuration, environment, metrics, log and checkpoints."""

import json
import logging
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from semisfl import __version__, checkpoint, config
from semisfl.config import Config

log = logging.getLogger(__name__)


class RunDirectory:
    """Files are only ever added or replaced whole; a failed write is said and does not end the run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unwritten: list[str] = []

    @classmethod
    def create(cls, path: Path, run_config: Config) -> "RunDirectory":
        """A new directory; never one that holds a run already."""
        if (path / "config.toml").exists():
            raise ValueError(f"{path} already holds a run; choose another --out, or continue it with --resume {path}")
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / "config.toml").write_text(to_toml(run_config), encoding="utf-8")
            (path / "environment.json").write_text(json.dumps(environment(), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"cannot write to {path}: {error.strerror or error}; choose another --out") from error
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        if not (path / "config.toml").is_file():
            raise ValueError(f"{path} holds no run (no config.toml); --resume wants a run's directory")
        return cls(path)

    def config(self) -> Config:
        return config.parse(config.read(self.path / "config.toml"))

    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.path / "metrics.jsonl")

    def keep_metrics_before(self, round_index: int) -> list[dict[str, Any]]:
        """Drop the lines of rounds that a resumed run is going to repeat."""
        rows = [row for row in self.metrics() if row["round"] < round_index]
        temporary = self.path / ".metrics.tmp"
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        os.replace(temporary, self.path / "metrics.jsonl")
        return rows

    def append(self, row: dict[str, Any]) -> None:
        """One line of metrics; lines a full disk refuses are kept and tried again with the next."""
        self._unwritten.append(json.dumps(row) + "\n")
        try:
            with open(self.path / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write("".join(self._unwritten))
            self._unwritten.clear()
        except OSError as error:
            log.warning("cannot write metrics to %s: %s; will try again", self.path, error)

    def save(self, name: str, state: dict[str, Any]) -> bool:
        """Write checkpoint ``name``; False, and the previous one is kept, if the disk refuses."""
        try:
            checkpoint.write(self.path / f"{name}.safetensors", state)
        except OSError as error:
            log.warning("cannot write checkpoint %s: %s; the previous one is kept", name, error)
            return False
        return True

    def load(self, name: str = "latest") -> dict[str, Any]:
        return checkpoint.read(self.path / f"{name}.safetensors")

    def log_to_file(self) -> logging.Handler:
        handler = logging.FileHandler(self.path / "run.log", encoding="utf-8")
        formatter = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%SZ")
        formatter.converter = time.gmtime
        handler.setFormatter(formatter)
        return handler


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


def to_toml(run_config: Config) -> str:
    """The configuration as TOML; fields that are none are left out, which means the same."""
    lines: list[str] = []

    def section(values: dict[str, Any], path: str) -> None:
        plain = {k: v for k, v in values.items() if not isinstance(v, dict) and v is not None}
        if path and plain:
            lines.append(f"\n[{path}]")
        lines.extend(f"{key} = {json.dumps(value)}" for key, value in plain.items())
        for key, value in values.items():
            if isinstance(value, dict):
                section(value, f"{path}.{key}" if path else key)

    section(run_config.model_dump(), "")
    return "\n".join(lines) + "\n"
