"""Return what the page shows as plain values, one function per request."""

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from semisfl.metrics import ACCURACY_OF, AXES, panels_of
from semisfl.runs.declared import metrics_of
from semisfl.runs.grouping import judged_on
from semisfl.runs.labels import alike_but_for_seed, flatten
from semisfl.runs.reading import runs_inside
from semisfl.settings.lookup import title_of
from semisfl.watch.colours import Colours
from semisfl.watch.coverage import OfClient
from semisfl.watch.device_events import DeviceEvents
from semisfl.watch.follow import Followed

ACTIVE = ("running", "waiting", "paused")
"""States of a run whose process lives."""
BINS = 60
"""Most columns of the map of coverage."""
NOBODY = OfClient()
"""Shares of a client that was never chosen: none."""

Plain = dict[str, Any]


class Runs:
    """The runs at some paths. A folder that is no run stands for those directly inside it, also ones
    that come later."""

    def __init__(self, paths: Sequence[Path]) -> None:
        for path in paths:
            if not path.is_dir():
                raise ValueError(f"{path} is no folder; give run directories, or a folder of them")
        self._paths = [path.resolve() for path in paths]
        self._named = dict(zip(self._paths, paths, strict=True))
        self._followed: dict[str, Followed] = {}
        self._colours = Colours()

    def listing(self) -> Plain:
        """Return every run with its state."""
        self._find()
        runs = []
        for key, followed in self._followed.items():
            with followed.lock:
                followed.look()
                runs.append({"id": key, **_summary(followed)})
        with_settings = [run for run in runs if run["method"]]
        configs = [self._followed[run["id"]].config for run in with_settings]
        for label, places in alike_but_for_seed(configs):
            for place in places:
                with_settings[place]["label"] = label
        self._colours.add(self._followed)
        for run in runs:
            run["colour"] = self._colours.of.get(run["id"], 0)
        folders = [str(path) for path in self._named.values()]
        return {
            "time": time.time(),
            "folders": folders,
            "runs": runs,
            "axes": [vars(axis) for axis in AXES],
            "panels": self._panels({run["method"] for run in with_settings}),
        }

    def _panels(self, methods: set[str]) -> list[Plain]:
        """Return every chart of the view Training, with the keys of its lines."""
        keys = {key for followed in self._followed.values() for key in followed.columns}
        other = {key for key in keys if key == "round" or key.startswith(ACCURACY_OF)}
        metrics = metrics_of(sorted(methods), sorted(keys - other))
        return [
            {**vars(panel), "lines": [{"key": one.key, "name": one.line} for one in lines]}
            for panel, lines in panels_of(metrics.values()).items()
        ]

    def rounds(self, have: Mapping[str, tuple[int, int]]) -> Plain:
        """Return the rounds of each run beyond those that the browser has, with their epoch."""
        answer: Plain = {}
        for key, (epoch, count) in have.items():
            followed = self._followed.get(key)
            if followed is None:
                continue
            with followed.lock:
                followed.look()
                first = count if epoch == followed.epoch else 0
                columns = {name: values[first:] for name, values in followed.columns.items()}
                answer[key] = {"epoch": followed.epoch, "first": first, "columns": columns}
        return {"runs": answer}

    def clients(self, key: str) -> Plain:
        followed = self._one(key)
        with followed.lock:
            followed.look()
            holdings = followed.read_json("holdings.json")
            roster = followed.read_json("roster.json").get("index", {})
            names = dict(enumerate(holdings.get("names") or ()))
            names |= {client: name for name, client in roster.items()}
            held = [sum(counts) for counts in holdings.get("clients", [])]
            starts, shares = followed.coverage.over(BINS, followed.devices.since)
            clients = []
            for number in sorted({*shares, *range(len(held)), *names}):
                of = shares.get(number, NOBODY)
                clients.append(
                    {
                        "client": number,
                        "name": names.get(number),
                        "images": held[number] if 0 <= number < len(held) else None,
                        "rounds": of.rounds,
                        "missed": of.missed,
                        "mean": of.total / of.rounds if of.rounds else None,
                        "last": of.last,
                        "last_round": of.last_round + 1 if number in shares else None,
                    }
                )
            return {
                "clients": clients,
                "holdings": holdings,
                "coverage": {
                    "rounds": [start + 1 for start in starts],
                    "clients": list(shares),
                    "shares": [of.means(len(starts)) for of in shares.values()],
                },
            }

    def devices(self, key: str) -> Plain:
        followed = self._one(key)
        with followed.lock:
            followed.look()
            standing = followed.read_json("fleet.json")
            running = followed.state()[0] in ACTIVE
            return {
                "time": standing.get("time"),
                "places": _integer(followed.config, "clients", "total", 0) or None,
                "devices": _devices(followed.devices, standing.get("clients", []), running),
                "events": list(followed.devices.latest)[::-1],
                "counts": dict(followed.devices.counts),
            }

    def log(self, key: str, start: int) -> Plain:
        lines, end = self._one(key).log(start)
        return {"lines": lines, "next": end}

    def settings(self) -> Plain:
        self._find()
        answer, presets = {}, {}
        for key, followed in self._followed.items():
            with followed.lock:
                followed.look()
                answer[key] = _as_text(followed.config)
                if (preset := followed.preset()) is not None:
                    name, changed = preset
                    presets[key] = {"name": name, "changed": _as_text(changed)}
        return {"runs": answer, "presets": presets}

    def everything(self) -> Plain:
        """Return everything at once, for a page that is one file."""
        listing = self.listing()
        keys = [run["id"] for run in listing["runs"]]
        return {
            "runs": listing,
            "rounds": self.rounds(dict.fromkeys(keys, (0, 0))),
            "clients": {key: self.clients(key) for key in keys},
            "devices": {key: self.devices(key) for key in keys},
            "log": {key: self.log(key, -1) for key in keys},
            "settings": self.settings(),
        }

    def _one(self, key: str) -> Followed:
        if key not in self._followed:
            raise KeyError(key)
        return self._followed[key]

    def _find(self) -> None:
        followed: dict[str, Followed] = {}
        for path in self._paths:
            inside = [path] if (path / "config.toml").is_file() else runs_inside(path)
            for place in filter(Path.is_dir, inside):
                key = hashlib.blake2b(os.fsencode(place), digest_size=6).hexdigest()
                followed[key] = self._followed.get(key) or Followed(place)
        self._followed = followed


def _devices(events: DeviceEvents, enrolled: Sequence[Plain], running: bool) -> list[Plain]:
    """Return every enrolled device and those that were turned away, with their states."""
    away = dict(events.turned_away)
    devices = []
    for device in enrolled:
        often, reason = events.left_out.get(device.get("client", -1), (0, ""))
        turned_away = away.pop(str(device.get("name")), None)
        here = "here" if running and device.get("since") else "away"
        standing = {"state": here, "reason": reason, "left_out": often}
        if here == "away" and turned_away is not None:
            standing |= {"state": turned_away["state"], "reason": turned_away["reason"]}
        devices.append({**device, **standing})
    return devices + [{"name": name, **standing} for name, standing in away.items()]


def _summary(followed: Followed) -> Plain:
    config, standing = followed.config, followed.standing
    method = config.get("method")
    state, note = followed.state()
    classes = followed.classes()
    return {
        "name": followed.path.name,
        "path": str(followed.path),
        "method": method if isinstance(method, str) else None,
        "title": title_of(method) if isinstance(method, str) else None,
        "label": title_of(method) if isinstance(method, str) else followed.path.name,
        "state": state,
        "note": note,
        "active": state in ACTIVE,
        "problem": followed.problem or "; ".join(followed.warnings) or None,
        "done": followed.done,
        "rounds": followed.rounds,
        "judged_on": judged_on(config),
        "chance": 100 / classes if classes else None,
        "first_test": min(_integer(config, "runtime", "evaluate_every", 1), followed.rounds),
        "first_clients": _integer(config, "server", "pretrain_rounds", 0) + 1,
        "accuracy": standing.accuracy,
        "best": standing.best,
        "bytes": standing.bytes,
        "seconds": standing.seconds,
        "network": config.get("fleet", {}).get("kind") == "network",
    }


def _as_text(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in flatten(values).items()}


def _integer(config: Mapping[str, Any], section: str, key: str, default: int) -> int:
    """Return a whole number of a file that may be from another version."""
    value = config.get(section, {}).get(key)
    return value if isinstance(value, int) else default
