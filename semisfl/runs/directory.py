"""A run's directory: its configuration, environment, metrics, log and checkpoints.

- ``config.toml``: all settings, defaults included, so that a later version trains the same run
- ``environment.json`` and ``holdings.json``: title of the method, versions and machine; who held how many images of each class
- ``metrics.jsonl`` and ``run.log``: a line per round, and what was said
- ``latest``, ``previous`` and ``best.safetensors``: the state to continue from, the one before it, the best model

A server of devices adds ``fleet.json``, ``fleet.jsonl`` and ``roster.json``.
"""

import contextlib
import json
import logging
import os
import platform
import shlex
import shutil
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch

from semisfl.data.holdings import Holdings
from semisfl.files import TEMPORARY, append_whole, remove_temporary, write_whole
from semisfl.runs import checkpoint
from semisfl.runs.lock import Taken, take
from semisfl.runs.reading import (
    ENVIRONMENT,
    HOLDINGS,
    METRICS,
    parse_metrics,
    read_config,
    read_environment,
)
from semisfl.runs.sinks import MetricsFile
from semisfl.settings import config, lookup
from semisfl.settings.config import Config, ConfigError
from semisfl.settings.plain_values import flatten
from semisfl.settings.run import NetworkConfig, StopConfig
from semisfl.settings.toml import to_toml
from semisfl.settings.version import VERSION

log = logging.getLogger(__name__)

CHANGEABLE = (*(f"stop.{key}" for key in StopConfig.model_fields), "sinks")
"""Settings that may change when a run is continued: they change none of its numbers."""
FLEET_CHANGEABLE = (
    *("clients.total", "clients.active", "robust.*"),
    *(f"network.{key}" for key in NetworkConfig.model_fields),
)
"""Settings that may change too if the clients are devices, which come and go anyway."""


class RunDirectory:
    """The files of a run. Each is written whole; a failed write is logged and does not end the run.

    One process at a time may write: `create` and `lock` take the lock, `unlock` and the end of the process release it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record = MetricsFile(path / METRICS)
        self._unsaved: set[str] = set()
        self.latest_round: int | None = None
        """The round of the good checkpoint ``latest``; None: there is none, or it was not checked."""
        self._before: set[Path] | None = None
        self._lock: int | None = None

    @property
    def unsaved(self) -> list[str]:
        """Return the names of files that the disk refused and that were not written since."""
        return sorted(self._unsaved | ({METRICS} if self.record.unwritten else set()))

    @classmethod
    def create(
        cls,
        path: Path,
        run_config: Config,
        holdings: Holdings | None = None,
        device: str = "auto",
    ) -> "RunDirectory":
        """Create and lock the directory of a new run, with its configuration, environment and ``holdings``.

        ``path`` may be a folder with other files. ``device`` is where the run computes, for its environment. Raises
        `Taken` if there is a run already, and ValueError if the disk refuses; then what was created is removed again.
        """
        directory = cls(path)
        try:
            # Weights and the names of devices are for the owner alone.
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            present = set(path.iterdir())
            directory.lock()
            cls.check_free(path)  # of two runs started at once, one is refused
            directory._before = present  # the refused run must not remove the files of the other
            described = {"title": lookup.title_of(run_config.method), **environment(device)}
            content = json.dumps(described, indent=2) + "\n"
            write_whole(path / ENVIRONMENT, content.encode())
            if holdings is not None:
                write_whole(path / HOLDINGS, holdings.as_json().encode())
            # Last: a directory with a configuration is a run.
            write_whole(path / "config.toml", to_toml(run_config).encode())
        except OSError as error:
            directory.undo()
            raise ValueError(
                f"cannot write to {path}: {error.strerror or error}; choose another --out"
            ) from error
        except BaseException:
            directory.undo()
            raise
        return directory

    @staticmethod
    def check_free(path: Path) -> None:
        """Raise `Taken` if there is a run in ``path``, before anything costly is done."""
        if (path / "config.toml").exists():
            raise Taken(
                f"{path} already holds a run; choose another --out, or continue it with --resume "
                f"{shlex.quote(str(path))}"
            )

    def undo(self) -> None:
        """Remove everything that `create` added; nothing of a directory that was opened."""
        self.unlock()
        if self._before is not None:
            for file in set(self.path.iterdir()) - self._before:
                shutil.rmtree(file) if file.is_dir() else file.unlink()
            with contextlib.suppress(OSError):  # it was there before, with other files
                self.path.rmdir()

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """Return the run in the directory ``path``, or the one that the checkpoint ``path`` belongs to.

        Raises ValueError if there is none. Neither locks nor changes anything.
        """
        if path.suffix == ".safetensors":
            path = path.parent
        if not (path / "config.toml").is_file():
            raise ValueError(
                f"{path} holds no run (no config.toml); --resume wants a run's directory"
            )
        return cls(path)

    def lock(self) -> None:
        """Keep other processes out until `unlock` or the end of this process; raise `Taken` if one is in."""
        self._lock = take(self.path)
        remove_temporary(self.path)

    def unlock(self) -> None:
        """Let other processes in; does nothing if the directory is not locked."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def config(self) -> Config:
        """Return the configuration; raise ConfigError if it names code that nobody here asked for."""
        values = read_config(self.path)
        names = [values["method"], values.get("robust")]
        lookup.check_importable(names, f"{self.path / 'config.toml'}")
        return config.parse(values)

    def changed(self, settings: Sequence[str]) -> Config:
        """Return the configuration with ``key=value`` assignments, as ``--set`` takes them.

        Raises `ConfigError` for settings that must not change when a run is continued. What may change is `CHANGEABLE`
        and, if the clients are devices, `FLEET_CHANGEABLE`. The file is not written.
        """
        here = self.config()
        allowed = CHANGEABLE + (FLEET_CHANGEABLE if here.fleet.kind == "network" else ())
        for assignment in settings:
            key = assignment.partition("=")[0].strip()
            if not any(fnmatchcase(key, one) for one in allowed):
                raise ConfigError(
                    f"--set {assignment!r}: --resume continues a run as it was set up; "
                    f"what can be changed is {', '.join(allowed)}"
                )
        values = config.override(here.model_dump(exclude_none=True), list(settings))
        typed = [assignment.partition("=")[0].strip() for assignment in settings]
        written = here.model_dump(exclude=set(typed))
        lookup.check_importable(written, f"{self.path / 'config.toml'}")
        if (rule := here.robust.aggregate) != values["robust"]["aggregate"]:
            values["robust"].pop(lookup.aggregate(rule).name, None)
        return config.parse(values)

    def keep_config(self, run_config: Config) -> None:
        """Write the configuration that a run continues with, and log the settings that changed."""
        was, now = (flatten(one.model_dump()) for one in (self.config(), run_config))
        for key in dict.fromkeys((*was, *now)):
            if was.get(key) != now.get(key):
                log.info("%s was %s and is now %s", key, was.get(key), now.get(key))
        if was != now:
            write_whole(self.path / "config.toml", to_toml(run_config).encode())

    def warn_of_changes(self, device: str) -> None:
        """Warn if the environment differs from the first one in a way that changes results."""
        before, now = read_environment(self.path), environment(device)
        # With other thread counts, sums differ in the last bits, and soon the whole run differs.
        if now["gpu"] is None and before.get("threads", now["threads"]) != now["threads"]:
            log.warning(
                "the number of threads was %s and is now %s: the run will not be bit-identical; "
                "OMP_NUM_THREADS=%s makes it so",
                before["threads"],
                now["threads"],
                before["threads"],
            )

    def keep_metrics_before(self, round_index: int) -> list[dict[str, Any]]:
        """Remove the lines of rounds that a resumed run will repeat; return the others as plain values.

        ``round_index`` is the first round to repeat. A last line that a crash cut off is removed too.
        """
        path = self.path / METRICS
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        rounds = [one for one in parse_metrics(lines, path, dict) if one["round"] < round_index]
        if len(rounds) < round_index:
            log.warning("%s has only %d of the %d rounds before", path, len(rounds), round_index)
        kept = lines[: len(rounds)]
        # Truncate instead of writing a new file: that also works on a full disk.
        if lines:
            os.truncate(path, sum(map(len, kept)))
        if kept and not kept[-1].endswith(b"\n"):
            append_whole(path, b"\n")
        return rounds

    def save(self, name: str, state: dict[str, Any]) -> bool:
        """Write ``state`` as checkpoint ``name`` and return True.

        If the disk refuses, the previous checkpoint of that name stays, and the result is False.
        """
        return self._save(name, lambda path: checkpoint.write(path, state))

    def save_latest(self, state: dict[str, Any]) -> bool:
        """Write checkpoint ``latest``, as `save`; the good one before it, of another round, becomes ``previous``."""

        def rotate(path: Path) -> None:
            fresh = path.with_name(f".next{TEMPORARY}")
            checkpoint.write(fresh, state)
            if path.exists() and self.latest_round not in (None, state["round"]):
                os.replace(path, path.with_name("previous.safetensors"))
            os.replace(fresh, path)

        self.record.sync()
        saved = self._save("latest", rotate)
        if saved:
            self.latest_round = state["round"]
        return saved

    def _save(self, name: str, write: Callable[[Path], None]) -> bool:
        """Let ``write`` write a checkpoint's file; return whether the disk took it."""
        file = f"{name}.safetensors"
        try:
            write(self.path / file)
        except OSError as error:
            reason = error.strerror or error
            log.warning("cannot write checkpoint %s: %s; the previous one is kept", name, reason)
            self._unsaved.add(file)
            return False
        self._unsaved.discard(file)
        return True

    def load(self, name: str = "latest") -> dict[str, Any]:
        """Return the state in checkpoint ``name``."""
        return checkpoint.read(self.path / f"{name}.safetensors")


def environment(device: str = "auto") -> dict[str, Any]:
    """Return what the numbers of a run on ``device`` may depend on besides its configuration.

    That is the versions of Python, torch and numpy, the platform, the cores and threads, and the GPU's name.
    """
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
