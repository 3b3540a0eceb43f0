"""Show runs without the names of their devices, on a page that anybody on the machine can open."""

import re
from collections.abc import Callable
from typing import Any

from semisfl.watch.views import Plain, Runs

KEPT = {"event", "state", "time"}
"""Keys whose values are words of the page, whatever devices are called."""
ADDRESSES = {"peer", "address"}

Mask = Callable[[str], str]


class Unnamed(Runs):
    """The same runs; a device is called by its place, or "a device" if it has none."""

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
        """Return what replaces every known name of a run's devices in a text."""
        followed = self._one(key)
        with followed.lock:
            index = followed.read_json("roster.json").get("index", {})
            others = {*followed.devices.turned_away}
            others |= {str(event.get("name", "?")) for event in followed.devices.latest}
        instead = dict.fromkeys(others - {"?"}, "a device")
        if isinstance(index, dict):
            instead |= {str(name): f"client {place}" for name, place in index.items()}
        if not instead:
            return lambda text: text
        names = "|".join(map(re.escape, sorted(instead, key=len, reverse=True)))
        pattern = re.compile(rf"(?<![\w.-])(?:{names})(?![\w-])")
        return lambda text: pattern.sub(lambda match: instead[match[0]], text)


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
