"""Follow a run directory as it grows: read what was added since the last look, and tell the run's state.

A run may be finished, running, waiting for devices, stopped, crashed or unfinished. Its process is another one,
perhaps on another machine, so everything follows from files. A run that is resumed may write its metrics anew.
"""

import json
import platform
import re
import time
from pathlib import Path
from typing import Any

from semisfl.files import read_json, stamp
from semisfl.metrics import RoundMetrics
from semisfl.runs.reading import Standing, limits_of, met, read_config
from semisfl.settings.catalog import DATA
from semisfl.settings.config import ConfigError, parse
from semisfl.settings.counts import plural
from semisfl.settings.plain_values import flatten
from semisfl.settings.presets import changes
from semisfl.watch.clients import Coverage, DeviceEvents

STOPPED = ("stopped before round", "stopped by a callback")
"""Texts in the last line of the log of a run that was asked to stop."""
ELSEWHERE_SECONDS = 600.0
"""A run on another machine that wrote nothing for so long does not count as running."""
LATEST_LOG = 64 * 1024
"""Bytes of a log that are shown at first."""
MOST_LOG = 256 * 1024
"""Bytes of a log in one answer."""
COMPARED = 64
"""Bytes before the offset that must still be the same; else the file was written anew."""


class Lines:
    """A file of lines that grows, such as ``metrics.jsonl``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        """Where the next line begins."""
        self._inode = 0
        self._before = b""
        """The last bytes before the offset, at most COMPARED."""

    def new(self) -> tuple[bool, list[bytes]]:
        """Return whether the file was started again, and the complete lines since the last call."""
        try:
            with self._path.open("rb") as file:
                status = self._path.stat()
                file.seek(max(0, self._offset - len(self._before)))
                anew = status.st_ino != self._inode or file.read(len(self._before)) != self._before
                if anew:
                    self._offset, self._inode, self._before = 0, status.st_ino, b""
                file.seek(self._offset)
                data = file.read()
        except OSError:
            anew = self._inode != 0
            self._offset, self._inode, self._before = 0, 0, b""
            return anew, []
        lines_read = data[: data.rfind(b"\n") + 1]
        self._offset += len(lines_read)
        self._before = (self._before + lines_read)[-COMPARED:]
        return anew, lines_read.splitlines()


def text_from(path: Path, start: int) -> tuple[list[str], int]:
    """Return complete lines of a text file, and the byte offset where they end.

    ``start``: the offset where earlier lines ended, or -1 for the latest lines.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            known = 0 <= start <= size
            begin = file.seek(start if known else max(0, size - LATEST_LOG))
            data = file.read(MOST_LOG)
    except OSError:
        return [], 0
    end = data.rfind(b"\n") + 1
    lines = data[:end].decode("utf-8", "replace").splitlines()
    # The first of the latest lines is only the rest of one, unless the file begins there.
    return (lines if known or begin == 0 else lines[1:]), begin + end


class Followed:
    """All that is known about one run, as of the last `look`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: dict[str, Any] = {}
        """The settings of config.toml; empty while it cannot be read."""
        self.problem: str | None = None
        """One line about files that cannot be read."""
        self.epoch = 0
        """How often the metrics file was started again, as happens when a run is resumed."""
        self._config_read: tuple[object, ...] = ()
        self.colour: int | None = None
        """The number of its colour in charts; `Runs` gives it."""
        self._small: dict[str, tuple[tuple[object, ...], dict[str, Any]]] = {}
        """The values of small JSON files, by name, each with the stamp of the file when it was read."""
        self._metrics = Lines(path / "metrics.jsonl")
        self._events = Lines(path / "fleet.jsonl")
        self.devices = DeviceEvents()
        self._forget_rounds()

    def _forget_rounds(self) -> None:
        """Begin anew, without rounds."""
        self.epoch += 1
        self.columns: dict[str, list[Any]] = {"round": []}
        """One list per metric, with a value or None per round."""
        self.standing = Standing()
        self.coverage = Coverage()
        self.warnings: list[str] = []
        """Reasons why the run cannot work as it is."""

    def look(self) -> None:
        """Read what is new in the run's files; a damaged line becomes the `problem`."""
        self._read_config()
        anew, lines = self._metrics.new()
        if anew and self.columns["round"]:
            self._forget_rounds()
        for line in lines:
            try:
                self._add(RoundMetrics.from_dict(json.loads(line)))
            except ValueError as error:
                self.problem = f"a line of metrics.jsonl is damaged: {error}"
        anew, lines = self._events.new()
        if anew and self.devices.counts:
            self.devices = DeviceEvents()
        for line in lines:
            self.devices.add(line)

    def _read_config(self) -> None:
        """Read config.toml if it changed."""
        changed = stamp(self.path / "config.toml")
        if changed == self._config_read:
            return
        self._config_read = changed
        try:
            self.config, self.problem = read_config(self.path), None
        except (ValueError, OSError) as error:
            self.problem = str(error)

    def _add(self, metrics: RoundMetrics) -> None:
        """Add a round to the columns, the standing and the coverage."""
        done = len(self.columns["round"])
        values = metrics.numbers() | {"round": metrics.round}
        for key in values.keys() | self.columns.keys():
            self.columns.setdefault(key, [None] * done).append(values.get(key))
        self.standing = self.standing.then(metrics)
        self.warnings += map(str, metrics.warnings or [])
        self.coverage.add(metrics.round, metrics.coverage_by_client or {})

    # --- what the files say ----------------------------------------------------------------------

    @property
    def rounds(self) -> int:
        """Return how many rounds the run is to have; 0 if that is not known."""
        return int(self.config["rounds"]) if isinstance(self.config.get("rounds"), int) else 0

    @property
    def done(self) -> int:
        """Return how many rounds are done."""
        return self.columns["round"][-1] + 1 if self.columns["round"] else 0

    def state(self) -> tuple[str, str]:
        """Return the state in one word, and a line about it.

        It is finished, running, waiting, stopped, crashed or unfinished.
        """
        if self.done and self.done >= self.rounds > 0:
            return "finished", f"{plural(self.rounds, 'round')} done"
        limit = met(limits_of(self.config), self.standing) if self.done else None
        if limit is not None:
            return "finished", f"stop.{limit} = {self.config['stop'][limit]} is met"
        holder, held = self._lock_holder()
        if held and (waiting := self.read_json("fleet.json").get("waiting")):
            return "waiting", f"{waiting}; {self.done} of {self.rounds} rounds are done"
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

    def _lock_holder(self) -> tuple[str | None, bool]:
        """Return which process works or worked on the run (None: no file says so), and whether it still does.

        Linux lists all locks in /proc/locks. This takes no lock: even a short one could make a run fail to start.
        """
        file = self.path / "run.lock"
        try:
            holder, inode = file.read_text().strip(), file.stat().st_ino
            locks = Path("/proc/locks").read_text().splitlines()
        except (OSError, UnicodeDecodeError):
            return None, False
        match = re.fullmatch(r"process (\d+) on (.*)", holder)
        if match is None:
            return holder or None, False
        if match[2] != platform.node():
            return holder, time.time() - self._updated() < ELSEWHERE_SECONDS
        return holder, any(f":{inode} " in line and f" {match[1]} " in line for line in locks)

    def _updated(self) -> float:
        """Return when the run last wrote something, in seconds after the epoch."""
        names = ("config.toml", "metrics.jsonl", "run.log", "fleet.json")
        files = [file for file in map(self.path.joinpath, names) if file.exists()]
        return max((file.stat().st_mtime for file in files), default=0.0)

    def log(self, start: int) -> tuple[list[str], int]:
        """Return lines of the log, as `text_from` does."""
        return text_from(self.path / "run.log", start)

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the values of a small file; empty if it is missing or damaged. It is read again if it changed."""
        changed = stamp(self.path / name)
        if self._small.get(name, ((), {}))[0] != changed:
            self._small[name] = changed, read_json(self.path / name)
        return self._small[name][1]

    def classes(self) -> int:
        """Return the number of classes; 0 if it is not known."""
        held = self.read_json("holdings.json")
        names, server = held.get("classes", []), held.get("server", [])
        # The server has labels of every class, but none of images without a known label.
        unknown = bool(names) and names[-1].startswith("unknown") and not sum(server[-1:])
        known = DATA.get(str(self.config.get("data", {}).get("name")))
        return len(names) - unknown or (known.classes if known else None) or 0

    def began(self) -> int:
        """Return the time of the oldest file, which tells runs that began earlier from later ones."""
        return min((file.stat().st_mtime_ns for file in self.path.iterdir()), default=0)

    def preset(self) -> tuple[str, dict[str, Any]] | None:
        """Return the nearest preset, and its values of the settings that this run changed."""
        method = self.config.get("method")
        if not isinstance(method, str) or ":" in method:  # its code would have to be imported
            return None
        try:
            values = parse(self.config).model_dump(mode="json", exclude_none=True)
            return changes(flatten(values, lists=False))
        except ConfigError:
            return None
