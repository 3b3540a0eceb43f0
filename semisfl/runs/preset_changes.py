"""Name the preset that a run comes from, and the settings in which it differs. Loads no torch."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from semisfl.settings import config as configs
from semisfl.settings import presets

OWN = ("method", "rounds", "seed")
"""Settings that a record names even if the preset has the same value."""

Flat = dict[str, Any]
"""The values of a configuration by dotted key."""


def nearest_preset(settings: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return the preset or variant that differs in the fewest values, and the keys that a record must name."""
    variants = [f"{base}+{variant}" for base in presets.PRESETS for variant in presets.VARIANTS]
    best: tuple[str, list[str]] | None = None
    for name in (*presets.PRESETS, *variants):
        there = _preset(name, str(settings["method"]))
        keys = [key for key in settings if key in OWN or settings[key] != there.get(key)]
        if best is None or len(keys) < len(best[1]):
            best = name, keys
    assert best is not None
    return best


def changes(settings: Mapping[str, Any]) -> tuple[str, Flat]:
    """Return the nearest preset of flat ``settings``, and the preset's values of those that differ."""
    name, keys = nearest_preset(settings)
    method = presets.values_of(name).get("method", configs.Config.model_fields["method"].default)
    there = _preset(name, str(settings["method"])) | {"method": method}
    return name, {key: there.get(key) for key in keys if settings[key] != there.get(key)}


@cache
def _preset(name: str, method: str) -> Flat:
    """Return the values of a preset under a method, by dotted key."""
    values = presets.values_of(name) | {"method": method}
    config = configs.parse(presets.completed(name, values))
    return flat(config.model_dump(mode="json", exclude_none=True))


def flat(values: Mapping[str, Any], prefix: str = "") -> Flat:
    """Return nested values by dotted key; lists stay values."""
    pairs: Flat = {}
    for key, value in values.items():
        if isinstance(value, dict):
            pairs |= flat(value, f"{prefix}{key}.")
        else:
            pairs[prefix + key] = value
    return pairs
