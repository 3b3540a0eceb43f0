"""Return what the page shows as plain values, one function per request."""

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from semisfl.metrics import ACCURACY_OF, AXES, panels_of
from semisfl.runs.declared import metrics_of
from semisfl.runs.grouping import judged_on
from semisfl.runs.preset_changes import flat
from semisfl.runs.reading import runs_inside
from semisfl.settings.lookup import title_of
from semisfl.watch.clients import ClientCoverage, DeviceEvents
from semisfl.watch.follow import Followed

ACTIVE = ("running", "waiting")
"""States of a run whose process lives."""
BINS = 60
"""Most columns of the map of coverage."""
NOBODY = ClientCoverage()
"""The coverage of a client that was never chosen."""
UNCOUNTED = ("seed", "stop", "sinks", "runtime")
"""Settings and sections in which runs of one colour may differ."""

Plain = dict[str, Any]


class Runs:
    """The runs at some paths, as plain values for the page.

    A folder that is no run stands for the runs directly inside it, also for those that come later. A run is
    known by its name, or by its path where two have one name.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        for path in paths:
            if not path.is_dir():
                raise ValueError(f"{path} is no folder; give run directories, or a folder of them")
        self._paths = paths
        self._followed: dict[str, Followed] = {}
        self._colours: dict[str, int] = {}
        """The number of each colour, by the settings that its runs have in common."""

    def listing(self) -> Plain:
        """Return every run with its state, and which charts the page has."""
        self._find()
        self._give_colours()
        runs = []
        for key, followed in self._followed.items():
            with followed.lock:
                followed.look()
                runs.append({"id": key, **_summary(followed)})
        methods = {run["method"] for run in runs if run["method"]}
        for method in methods:
            alike = [run for run in runs if run["method"] == method]
            configs = [flat(self._followed[run["id"]].config) for run in alike]
            for run, settings in zip(alike, _differences(configs), strict=True):
                run["differs"] = settings
        return {
            "time": time.time(),
            "folders": [str(path) for path in self._paths],
            "runs": runs,
            "axes": [vars(axis) for axis in AXES],
            "panels": self._panels(methods),
        }

    def _give_colours(self) -> None:
        """Give a colour to every run that has none, in the order in which they began.

        Runs that differ only in their seed share one. A run keeps its colour, whatever other runs appear.
        """
        for followed in self._followed.values():
            with followed.lock:
                followed.look()
        new = [one for one in self._followed.values() if one.colour is None and one.config]
        for followed in sorted(new, key=lambda one: (one.began(), one.path.name)):
            values = {k: v for k, v in followed.config.items() if k not in UNCOUNTED}
            alike = json.dumps(values, sort_keys=True, default=str)
            followed.colour = self._colours.setdefault(alike, len(self._colours))

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
        known = {followed.path: followed for followed in self._followed.values()}
        places: dict[Path, None] = {}
        for path in map(Path.resolve, self._paths):
            inside = [path] if (path / "config.toml").is_file() else runs_inside(path)
            places |= dict.fromkeys(filter(Path.is_dir, inside))
        often = Counter(place.name for place in places)
        self._followed = {
            place.name if often[place.name] == 1 else str(place): known.get(place)
            or Followed(place)
            for place in places
        }


def _differences(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return, for each run of one method, its settings that at most half of the runs have."""
    keys = sorted({key for config in configs for key in config})
    often = {key: Counter(str(config.get(key, "none")) for config in configs) for key in keys}
    return [
        ", ".join(
            f"{key}={value}"
            for key, value in ((key, str(config.get(key, "none"))) for key in keys)
            if 2 * often[key][value] <= len(configs)
        )
        for config in configs
    ]


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
        "differs": "",
        "colour": followed.colour or 0,
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
    return {key: str(value) for key, value in flat(values).items()}


def _integer(config: Mapping[str, Any], section: str, key: str, default: int) -> int:
    """Return a whole number of a file that may be from another version."""
    value = config.get(section, {}).get(key)
    return value if isinstance(value, int) else default
