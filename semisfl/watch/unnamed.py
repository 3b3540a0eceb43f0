"""Show runs without the names of their devices, on a page that anybody on the machine can open."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from semisfl.watch.tail import Lines
from semisfl.watch.views import Plain, Runs

KEPT = {"event", "state", "time", "by"}
"""Keys whose values are words of the page, whatever devices are called."""
ADDRESSES = {"peer", "address"}
OF_FLEET = {"changed", "paused", "resumed", "draining"}
"""Events whose name is no device's."""
INTRODUCED = re.compile(
    rb"^\S+ INFO ([\w.-]+) has certificate |^\S+ WARNING [a-z ]+ peer=\S+ identity=([\w.-]+) "
)
"""A line of the log that names a device, which may leave before it has a place, or whose event is not there yet."""
PEER = re.compile(r"\bpeer=\S+")

Mask = Callable[[str], str]


class Unnamed(Runs):
    """The same runs; a device is called by its place, or "a device" if it has none."""

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__(paths)
        self._introduced: dict[str, tuple[Lines, set[str]]] = {}

    def listing(self) -> Plain:
        answer = super().listing()
        for run in answer["runs"]:
            hide = self._mask(run["id"])
            run |= {key: _masked(run[key], hide) for key in ("note", "problem")}
        return answer

    def clients(self, key: str) -> Plain:
        answer = super().clients(key)
        return answer | {"clients": _masked(answer["clients"], self._mask(key))}

    def devices(self, key: str) -> Plain:
        answer: Plain = _masked(super().devices(key), self._mask(key))
        return answer

    def log(self, key: str, start: int) -> Plain:
        answer = super().log(key, start)
        return answer | {"lines": _masked(answer["lines"], self._mask(key))}

    def _mask(self, key: str) -> Mask:
        """Return what replaces every known name and address of a run's devices in a text."""
        followed = self._one(key)
        with followed.lock:
            followed.look()
            index = followed.read_json("roster.json").get("index", {})
            log, introduced = self._introduced.setdefault(
                key, (Lines(followed.path / "run.log"), set())
            )
            introduced |= {
                (match[1] or match[2]).decode()
                for match in map(INTRODUCED.match, log.new()[1])
                if match
            }
            others = {*followed.devices.turned_away, *introduced}
            others |= {
                str(event.get("name", "?"))
                for event in followed.devices.latest
                if str(event["event"]) not in OF_FLEET
            }
        instead = dict.fromkeys(others - {"?"}, "a device")
        instead |= {name: f"client {place}" for name, place in index.items()}
        names = "|".join(map(re.escape, sorted(instead, key=len, reverse=True))) or "(?!)"
        pattern = re.compile(rf"(?<![\w.-])(?:{names})(?![\w-])")
        return lambda text: pattern.sub(lambda match: instead[match[0]], PEER.sub("peer=?", text))


def _masked(value: Any, hide: Mask) -> Any:
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, list):
        return [_masked(item, hide) for item in value]
    if isinstance(value, dict):
        return {
            key: None if key in ADDRESSES else item if key in KEPT else _masked(item, hide)
            for key, item in value.items()
        }
    return value
