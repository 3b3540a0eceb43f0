"""Follow a run directory as it grows; nothing is read twice."""

import math
import platform
import re
import threading
import time
from pathlib import Path
from typing import Any

from semisfl.files import open_file, parse_json, read_json, stamp
from semisfl.metrics import RoundMetrics
from semisfl.runs.limits import Standing, limits_of, met
from semisfl.runs.preset_changes import changes, flat
from semisfl.runs.reading import read_config
from semisfl.settings.catalog import DATA
from semisfl.settings.config import ConfigError, parse
from semisfl.settings.counts import counted
from semisfl.watch.coverage import Coverage
from semisfl.watch.device_events import DeviceEvents
from semisfl.watch.tail import Lines, text_from

STOPPED = ("stopped before round", "stopped by a callback")
"""The last line of the log of a run that was asked to end."""
ELSEWHERE_SECONDS = 600.0
"""A run on another machine that wrote nothing for so long does not count as running."""


class Followed:
    """All that is known about one run. Any thread may ask, after `look`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: dict[str, Any] = {}
        self.problem: str | None = None
        """One line about files that cannot be read."""
        self.epoch = 0
        """How often the metrics file was started again, as happens when a run is resumed."""
        self.lock = threading.Lock()
        self._config_read: tuple[int, int] | None = None
        self._fleet_read: tuple[object, ...] = ()
        self._fleet_waits = ""
        self._classes_read: tuple[object, ...] = ()
        self._classes = 0
        self._metrics = Lines(path / "metrics.jsonl")
        self._events = Lines(path / "fleet.jsonl")
        self.devices = DeviceEvents()
        self._forget_rows()

    def _forget_rows(self) -> None:
        self.epoch += 1
        self.columns: dict[str, list[Any]] = {"round": []}
        """One list per metric, as long as there are rounds."""
        self.standing = Standing()
        self.coverage = Coverage()
        self.warnings: list[str] = []
        """Reasons why the run cannot work as it is."""

    def look(self) -> None:
        """Read what is new."""
        self._read_config()
        anew, lines = self._metrics.new()
        if anew and self.columns["round"]:
            self._forget_rows()
        for line in lines:
            try:
                self._add(RoundMetrics.from_dict(parse_json(line, lambda name: None)))
            except (ValueError, TypeError, OverflowError) as error:
                self.problem = f"a line of metrics.jsonl is damaged: {error}"
        anew, lines = self._events.new()
        if anew and self.devices.counts:
            self.devices = DeviceEvents()
        for line in lines:
            self.devices.add(line)

    def _read_config(self) -> None:
        try:
            status = (self.path / "config.toml").stat()
            changed = (status.st_mtime_ns, status.st_ino)
            if changed != self._config_read:
                self.config = read_config(self.path)
                self._config_read, self.problem = changed, None
        except OSError as error:
            self.problem = f"config.toml: {error.strerror or error}"
        except ValueError as error:
            self.problem = str(error)

    def _add(self, metrics: RoundMetrics) -> None:
        done = len(self.columns["round"])
        values = metrics.numbers() | {"round": metrics.round}
        for key in values.keys() | self.columns.keys():
            value = values.get(key)
            known = value is not None and math.isfinite(value)
            self.columns.setdefault(key, [None] * done).append(value if known else None)
        self.standing = self.standing.then(metrics)
        self.warnings += map(str, metrics.warnings or [])
        self.coverage.add(metrics.round, metrics.coverage_by_client or {})

    # --- what it comes to ------------------------------------------------------------------------

    @property
    def rounds(self) -> int:
        return int(self.config["rounds"]) if isinstance(self.config.get("rounds"), int) else 0

    @property
    def done(self) -> int:
        return self.columns["round"][-1] + 1 if self.columns["round"] else 0

    def state(self) -> tuple[str, str]:
        """Return the state in one word, and a line about it.

        It is finished, running, waiting, paused, stopped, crashed or unfinished.
        """
        if self.done and self.done >= self.rounds > 0:
            return "finished", f"{counted(self.rounds, 'round')} done"
        limit = met(limits_of(self.config), self.standing) if self.done else None
        if limit is not None:
            return "finished", f"stop.{limit} = {self.config['stop'][limit]} is met"
        holder, held = self._lock_holder()
        if held and (waiting := self._waiting()):
            word = waiting.partition(" ")[0]
            return word, f"{waiting}; {self.done} of {self.rounds} rounds are done"
        if held:
            return "running", f"round {self.done + 1} of {self.rounds}, {holder}"
        if holder is None:
            return "unfinished", f"{self.done} of {self.rounds} rounds are there"
        last_line = (self.log(-1)[0] or [""])[-1]
        if any(text in last_line for text in STOPPED):
            return "stopped", f"stopped in round {self.done + 1}; --resume goes on"
        return (
            "crashed",
            f"{holder} ended without saying why in round {self.done + 1}; --resume goes on",
        )

    def _waiting(self) -> str:
        """Return what a server waits for; an empty text if it trains."""
        changed = stamp(self.path / "fleet.json")
        if changed != self._fleet_read:
            self._fleet_read = changed
            self._fleet_waits = str(self.read_json("fleet.json").get("waiting", ""))
        return self._fleet_waits

    def _lock_holder(self) -> tuple[str | None, bool]:
        """Return which process works or worked on the run, and whether it still does.

        Takes no lock: even a short one could make a run fail to start.
        """
        file = self.path / "run.lock"
        try:
            with open_file(file) as content:
                holder, inode = content.read().decode().strip(), file.stat().st_ino
        except (OSError, UnicodeDecodeError):
            return None, False
        match = re.fullmatch(r"process (\d+) on (.*)", holder)
        if match is None:
            return holder or None, False
        if match[2] != platform.node():
            return holder, time.time() - self.updated() < ELSEWHERE_SECONDS
        return holder, any(
            f":{inode} " in line and f" {match[1]} " in line for line in _locks().splitlines()
        )

    def updated(self) -> float:
        """Return when the run last wrote something, in seconds after the epoch."""
        latest = 0.0
        for name in ("config.toml", "metrics.jsonl", "run.log", "fleet.json"):
            try:
                latest = max(latest, (self.path / name).stat().st_mtime)
            except OSError:
                continue
        return latest

    def log(self, start: int) -> tuple[list[str], int]:
        """Return lines of the log, as `text_from` does."""
        return text_from(self.path / "run.log", start)

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the values of a small file; empty if it is missing or damaged."""
        return read_json(self.path / name)

    def classes(self) -> int:
        """Return the number of classes; 0 if it is not known."""
        changed = stamp(self.path / "holdings.json")
        if changed != self._classes_read:
            self._classes_read = changed
            held = self.read_json("holdings.json")
            names, server = held.get("classes", []), held.get("server", [])
            # The server has labels of every class, but none of images without a known label.
            unknown = bool(names) and names[-1].startswith("unknown") and not sum(server[-1:])
            self._classes = len(names) - unknown
        known = DATA.get(str(self.config.get("data", {}).get("name")))
        return self._classes or (known.classes if known else None) or 0

    def began(self) -> int:
        """Return the time of the oldest file, which tells runs that began earlier from later ones."""
        try:
            return min((file.stat().st_mtime_ns for file in self.path.iterdir()), default=0)
        except OSError:
            return 0

    def preset(self) -> tuple[str, dict[str, Any]] | None:
        """Return the nearest preset, and its values of the settings that this run changed."""
        method = self.config.get("method")
        if not isinstance(method, str) or ":" in method:  # its code would have to be imported
            return None
        try:
            values = parse(self.config).model_dump(mode="json", exclude_none=True)
            return changes(flat(values))
        except ConfigError:
            return None


def _locks() -> str:
    try:
        return Path("/proc/locks").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
