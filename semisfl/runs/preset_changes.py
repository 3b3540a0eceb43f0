"""Name the preset that a run comes from, and the settings in which it differs. Loads no torch."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from semisfl.settings import config as configs
from semisfl.settings import presets

Flat = dict[str, Any]
"""The values of a configuration by dotted key."""


def changes(settings: Mapping[str, Any]) -> tuple[str, Flat]:
    """Return the preset or variant that differs from ``settings`` in the fewest values, and its values of those.

    ``settings`` are all values of a configuration by dotted key. A preset is compared with the method of
    ``settings``, so that settings of another method do not count.
    """
    variants = [f"{base}+{variant}" for base in presets.PRESETS for variant in presets.VARIANTS]
    there = {name: _preset(name, str(settings["method"])) for name in (*presets.PRESETS, *variants)}
    changed = {
        name: {key: values.get(key) for key in settings if settings[key] != values.get(key)}
        for name, values in there.items()
    }
    nearest = min(changed, key=lambda name: len(changed[name]))
    return nearest, changed[nearest]


@cache
def _preset(name: str, method: str) -> Flat:
    """Return the values of a preset under a method, by dotted key."""
    values = presets.values_of(name) | {"method": method}
    config = configs.parse(presets.complete(name, values))
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
