"""A run's directory: its configuration, environment, metrics, log and checkpoints."""

import contextlib
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from semisfl.data.holdings import Holdings
from semisfl.files import TEMPORARY, append_whole, remove_temporary, write_whole
from semisfl.runs import checkpoint
from semisfl.runs.lock import Taken, take
from semisfl.runs.metrics_file import read_metrics, rows_of
from semisfl.runs.sinks import MetricsFile
from semisfl.settings import config
from semisfl.settings.config import Config, ConfigError
from semisfl.settings.run import StopConfig
from semisfl.settings.toml import to_toml
from semisfl.settings.version import VERSION

log = logging.getLogger(__name__)

CHANGEABLE = (*(f"stop.{key}" for key in StopConfig.model_fields), "sinks")
"""Settings that a run may be continued with other values of: they change none of its numbers."""


class RunDirectory:
    """Files are only ever added or replaced whole; a failed write is said and does not end the run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record = MetricsFile(path / "metrics.jsonl")
        self._unsaved: set[str] = set()
        self._latest_round: int | None = None
        """Of the good checkpoint ``latest``; None: there is none, or nobody has looked."""
        self._made: list[Path] = []
        self._before: set[Path] | None = None
        self._lock: int | None = None

    @property
    def unsaved(self) -> list[str]:
        """What the disk refused and nothing later replaced."""
        return sorted(self._unsaved | ({"metrics.jsonl"} if self.record.unwritten else set()))

    @classmethod
    def create(
        cls, path: Path, run_config: Config, holdings: Holdings | None = None
    ) -> "RunDirectory":
        """A new directory; never one that holds a run already."""
        cls.check_free(path)
        directory = cls(path)
        try:
            directory._fill(run_config, holdings)
        except BaseException as failure:
            directory.undo()
            if isinstance(failure, OSError):
                reason = failure.strerror or failure
                raise ValueError(
                    f"cannot write to {path}: {reason}; choose another --out"
                ) from failure
            raise
        return directory

    @staticmethod
    def check_free(path: Path) -> None:
        """Refuse a place that `create` would refuse, before anything costly is done."""
        if (path / "config.toml").exists():
            raise Taken(
                f"{path} already holds a run; choose another --out, or continue it with --resume {path}"
            )
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file; choose another --out")

    def _fill(self, run_config: Config, holdings: Holdings | None) -> None:
        for folder in (self.path, *self.path.parents):
            if folder.exists():
                break
            self._made.append(folder)
        self.path.mkdir(parents=True, exist_ok=True)
        found = set(self.path.iterdir())
        self.lock()
        self.check_free(self.path)  # of two runs started at once, one is refused
        self._before = found  # and does not take away what the other one writes
        content = json.dumps(environment(), indent=2) + "\n"
        write_whole(self.path / "environment.json", content.encode())
        if holdings is not None:
            write_whole(self.path / "holdings.json", holdings.as_json().encode())
        write_whole(self.path / "config.toml", to_toml(run_config).encode())

    def undo(self) -> None:
        """Leave the place as `create` found it."""
        self.unlock()
        if self._before is not None:
            for file in set(self.path.iterdir()) - self._before:
                file.unlink()
        for folder in self._made:
            with contextlib.suppress(OSError):
                folder.rmdir()

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """The run in a directory, or of a checkpoint."""
        if path.suffix == ".safetensors":
            path = path.parent
        if not (path / "config.toml").is_file():
            raise ValueError(
                f"{path} holds no run (no config.toml); --resume wants a run's directory"
            )
        return cls(path)

    def lock(self) -> None:
        """Nobody else may run here until `unlock` or this process's end, however it comes."""
        self._lock = take(self.path)
        remove_temporary(self.path)

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def config(self) -> Config:
        file = self.path / "config.toml"
        values = config.read(file)
        # The last section is always there: without it, part of the file is missing, and what was
        # set there would silently be what it is by default.
        if missing := [key for key in ("method", "rounds", "runtime") if key not in values]:
            raise ConfigError(
                f"{file} is not whole: it has no {missing[0]!r}; restore it or start a run elsewhere"
            )
        return config.parse(values)

    def changed(self, settings: Sequence[str]) -> Config:
        """The configuration with ``key=value`` assignments that a run may be continued with."""
        here = self.config()
        for assignment in settings:
            key = assignment.partition("=")[0].strip()
            if key not in CHANGEABLE:
                raise ConfigError(
                    f"--set {assignment!r}: --resume continues a run as it was set up; "
                    f"what can be changed is {', '.join(CHANGEABLE)}"
                )
        values = here.model_dump(exclude_none=True)
        return config.parse(config.override(values, list(settings)))

    def keep_config(self, run_config: Config) -> None:
        """What a run goes on with, if that was changed."""
        if run_config != self.config():
            write_whole(self.path / "config.toml", to_toml(run_config).encode())

    def warn_of_changes(self) -> None:
        """Say what of the environment differs from the one the run began in, where it matters."""
        try:
            before = json.loads((self.path / "environment.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            log.warning("cannot read the environment the run began in: %s", error)
            return
        now = environment()
        # Sums that are split over other threads differ in the last bits, and a run in all of them.
        if now["gpu"] is None and before.get("threads", now["threads"]) != now["threads"]:
            log.warning(
                "the run began with %d threads and goes on with %d: it will not be bit-identical; "
                "OMP_NUM_THREADS=%d makes it so",
                before["threads"],
                now["threads"],
                before["threads"],
            )

    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.path / "metrics.jsonl", dict)

    def keep_metrics_before(self, round_index: int) -> list[dict[str, Any]]:
        """Drop the lines of rounds that a resumed run is going to repeat."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return []
        lines = path.read_bytes().splitlines(keepends=True)
        rows = [row for row in rows_of(lines, path, dict) if row["round"] < round_index]
        if len(rows) < round_index:
            log.warning("%s has only %d of the %d rounds before", path, len(rows), round_index)
        kept = lines[: len(rows)]
        # Cut off rather than written anew: that needs no room on a disk that is full.
        os.truncate(path, sum(map(len, kept)))
        if kept and not kept[-1].endswith(b"\n"):
            append_whole(path, b"\n")
        return rows

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

    def trust_latest(self, round_index: int) -> None:
        """Checkpoint ``latest`` is whole, and of this round: worth keeping when the next is written."""
        self._latest_round = round_index

    def save_latest(self, state: dict[str, Any]) -> bool:
        """Write checkpoint ``latest``; the good one before it becomes ``previous``."""
        latest, previous = (self.path / f"{name}.safetensors" for name in ("latest", "previous"))
        # A link, so that at no moment there is no latest one, and nothing is copied.
        before = previous.with_name(f".previous{TEMPORARY}")
        if self._latest_round not in (None, state["round"]):
            try:
                before.unlink(missing_ok=True)
                os.link(latest, before)
            except OSError as error:
                log.warning("cannot keep checkpoint %s beside the next: %s", latest, error)
        self.record.sync()
        try:
            if not self.save("latest", state):
                return False
            self._latest_round = state["round"]
            if before.exists():
                os.replace(before, previous)
        except OSError as error:
            log.warning("cannot keep checkpoint %s: %s", previous, error)
        finally:
            # A disk that has become read-only refuses even to remove what is not there.
            with contextlib.suppress(OSError):
                before.unlink(missing_ok=True)
        return True

    def load(self, name: str = "latest") -> dict[str, Any]:
        return checkpoint.read(self.path / f"{name}.safetensors")

    def log_to_file(self) -> logging.Handler:
        handler = _RunLog(self.path / "run.log", encoding="utf-8")
        formatter = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%SZ")
        formatter.converter = time.gmtime
        handler.setFormatter(formatter)
        return handler


class _RunLog(logging.FileHandler):
    """Lines that a full disk refuses are lost, and nothing else is: they were shown too."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


def environment() -> dict[str, Any]:
    """What else than its configuration a run's numbers may depend on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
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
