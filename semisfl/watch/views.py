"""What the page shows, as plain values: one method of `Runs` per request of the browser.

Values are numbers, texts, lists and dicts, so that they can be sent as JSON. The page's scripts make tables and
charts of them.
"""

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from semisfl.metrics import ACCURACY_OF, AXES, panels_of
from semisfl.runs.declared import metrics_of
from semisfl.runs.reading import read_title, runs_inside
from semisfl.runs.report import judged_on
from semisfl.settings.plain_values import flatten
from semisfl.watch.clients import ClientCoverage, DeviceEvents
from semisfl.watch.follow import Followed

ACTIVE = ("running", "waiting")
"""States of a run whose process lives."""
BINS = 60
"""Most columns of the chart of coverage; each is the mean over a span of rounds."""
NOBODY = ClientCoverage()
"""The coverage of a client that was never chosen."""
UNCOUNTED = ("seed", "stop", "sinks", "runtime")
"""Settings and sections in which runs of one colour may differ."""

Plain = dict[str, Any]
"""Values that JSON can hold."""


class Runs:
    """The runs at some paths, as plain values for the page. One thread at a time may call its methods.

    Each run has a key: its directory's name, or its path where two have one name.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        """Show the runs at ``paths``.

        A folder that is no run stands for the runs directly inside it, also for those that come later.
        """
        for path in paths:
            if not path.is_dir():
                raise ValueError(f"{path} is no folder; give run directories, or a folder of them")
        self._paths = paths
        self._followed: dict[str, Followed] = {}
        self._colours: dict[str, int] = {}
        """The number of each colour, by the settings that its runs have in common, as JSON."""

    def listing(self) -> Plain:
        """Return every run with its state, and the charts that the page has.

        The charts follow from the methods of the runs, because a method may have metrics of its own.
        """
        self._find()
        runs = [{"id": key, **_summary(followed)} for key, followed in self._followed.items()]
        methods = {run["method"] for run in runs if run["method"]}
        for method in methods:
            alike = [run for run in runs if run["method"] == method]
            configs = [flatten(self._followed[run["id"]].config, lists=False) for run in alike]
            for run, settings in zip(alike, _differences(configs), strict=True):
                run["differs"] = settings
        return {
            "time": time.time(),
            "folders": [str(path) for path in self._paths],
            "runs": runs,
            "axes": [vars(axis) for axis in AXES],
            "panels": self._panels(methods),
        }

    def _panels(self, methods: set[str]) -> list[Plain]:
        """Return the charts of the view Training, each with the metrics that are its lines."""
        keys = {key for followed in self._followed.values() for key in followed.columns}
        other = {key for key in keys if key == "round" or key.startswith(ACCURACY_OF)}
        metrics = metrics_of(sorted(methods), sorted(keys - other))
        return [
            {**vars(panel), "lines": [{"key": one.key, "name": one.line} for one in lines]}
            for panel, lines in panels_of(metrics.values()).items()
        ]

    def rounds(self, have: Mapping[str, tuple[int, int]]) -> Plain:
        """Return the rounds of each run that the browser lacks, as one list per metric.

        ``have``: for each run the epoch and the number of rounds that the browser has. If the run began its
        metrics anew since then, all rounds are returned, with another epoch.
        """
        answer: Plain = {}
        for key, (epoch, count) in have.items():
            if key in self._followed:
                followed = self._one(key)
                first = count if epoch == followed.epoch else 0
                columns = {name: values[first:] for name, values in followed.columns.items()}
                answer[key] = {"epoch": followed.epoch, "first": first, "columns": columns}
        return {"runs": answer}

    def clients(self, key: str) -> Plain:
        """Return a run's clients: names, numbers of images, and coverage over the rounds.

        A client's name is that of the device in its place, or of its folder of images. Of a place that was
        freed, only the rounds since then count.
        """
        followed = self._one(key)
        holdings = followed.read_json("holdings.json")
        roster = followed.read_json("roster.json").get("index", {})
        names = dict(enumerate(holdings.get("names") or ()))
        names |= {client: name for name, client in roster.items()}
        held = [sum(counts) for counts in holdings.get("clients", [])]
        starts, shares = followed.coverage.over(BINS, followed.devices.since)
        clients = []
        for number in sorted({*shares, *range(len(held)), *names}):
            one = shares.get(number, NOBODY)
            clients.append(
                {
                    "client": number,
                    "name": names.get(number),
                    "images": held[number] if 0 <= number < len(held) else None,
                    "rounds": one.rounds,
                    "missed": one.missed,
                    "mean": one.total / one.rounds if one.rounds else None,
                    "last": one.last,
                    "last_round": one.last_round + 1 if number in shares else None,
                }
            )
        return {
            "clients": clients,
            "holdings": holdings,
            "coverage": {
                "rounds": [start + 1 for start in starts],
                "clients": list(shares),
                "shares": [one.means(len(starts)) for one in shares.values()],
            },
        }

    def devices(self, key: str) -> Plain:
        """Return the devices of a served run with their states, and the latest events."""
        followed = self._one(key)
        status = followed.read_json("fleet.json")
        running = followed.state()[0] in ACTIVE
        return {
            "time": status.get("time"),
            "places": _integer(followed.config, "clients", "total", 0) or None,
            "devices": _devices(followed.devices, status.get("clients", []), running),
            "events": list(followed.devices.latest)[::-1],
            "counts": dict(followed.devices.counts),
        }

    def log(self, key: str, start: int) -> Plain:
        """Return the lines of a run's log from byte ``start`` on (-1: the latest), and where they end."""
        lines, end = self._one(key).log(start)
        return {"lines": lines, "next": end}

    def settings(self) -> Plain:
        """Return every run's settings, its nearest preset, and the preset's values of those it changed."""
        self._find()
        settings, presets = {}, {}
        for key, followed in self._followed.items():
            settings[key] = _as_text(followed.config)
            if (preset := followed.preset()) is not None:
                presets[key] = {"name": preset[0], "changed": _as_text(preset[1])}
        return {"runs": settings, "presets": presets}

    def everything(self) -> Plain:
        """Return the answers to all requests at once, for a page that is one file."""
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
        """Return a run, up to date; raise `KeyError` if there is none with this key."""
        followed = self._followed[key]
        followed.look()
        return followed

    def _find(self) -> None:
        """Look for runs that came or went, bring all of them up to date, and give new ones a colour.

        Colours are given in the order in which runs began. Runs that differ only in their seed share one, and a
        run keeps its colour, whatever other runs appear.
        """
        known = {followed.path: followed for followed in self._followed.values()}
        places: dict[Path, None] = {}
        for path in map(Path.resolve, self._paths):
            inside = [path] if (path / "config.toml").is_file() else runs_inside(path)
            places |= dict.fromkeys(filter(Path.is_dir, inside))
        runs = [known.get(place) or Followed(place) for place in places]
        for followed in runs:
            followed.look()
        often = Counter(followed.path.name for followed in runs)
        self._followed = {
            one.path.name if often[one.path.name] == 1 else str(one.path): one for one in runs
        }
        new = [one for one in runs if one.colour is None and one.config]
        for followed in sorted(new, key=lambda one: (one.began(), one.path.name)):
            values = {k: v for k, v in followed.config.items() if k not in UNCOUNTED}
            alike = json.dumps(values, sort_keys=True, default=str)
            followed.colour = self._colours.setdefault(alike, len(self._colours))


def _differences(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return, for each run of one method, the settings that tell it from the others, as one text.

    Those are its values that at most half of the runs have: what most of them have is not worth a mention.
    """
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
    """Return every enrolled device, and those that were turned away, with their states.

    Args:
        events: what ``fleet.jsonl`` says.
        enrolled: the devices of ``fleet.json``; ``since`` is when a device connected, None if it is away.
        running: whether the server's process lives.
    """
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
    """Return the line of a run in the table of runs."""
    config, standing = followed.config, followed.standing
    method = config.get("method")
    state, note = followed.state()
    classes = followed.classes()
    return {
        "name": followed.path.name,
        "path": str(followed.path),
        "method": method if isinstance(method, str) else None,
        "title": read_title(followed.path, method) if isinstance(method, str) else None,
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
    """Return nested settings as texts by dotted key."""
    return {key: str(value) for key, value in flatten(values, lists=False).items()}


def _integer(config: Mapping[str, Any], section: str, key: str, default: int) -> int:
    """Return a whole number of a file that may be from another version."""
    value = config.get(section, {}).get(key)
    return value if isinstance(value, int) else default
