"""Settings of earlier versions: what they meant when they were off. Files that hold them still load.

A retired key with a value that meant "off" is dropped, because today's code does just that. Any
other value is refused: the run it describes cannot be repeated with this version.
"""

from collections.abc import Collection, Mapping
from typing import Any

from semisfl.settings.sections import ConfigError

LAST_VERSION = "0.1.0"
"""The version that still had the retired settings."""

ANYTHING = object()
"""Stands for every value: the setting only mattered together with another retired one."""

RETIRED: dict[str, tuple[Any, ...]] = {
    "controller.warm_rounds": (0,),
    "controller.warm_steps": (ANYTHING,),
    "fedmatch.sparse": (False,),
    "fedmatch.threshold": (1e-5,),
    "fedswitch.rule": ("student",),
    "policy.distance_correlation": (0,),
    "semisfl.clustering_against": ("keys",),
    "semisfl.labels.adjust": (0,),
    "semisfl.labels.below": ("unused",),
    "semisfl.labels.below_weight": (ANYTHING,),
    "semisfl.labels.client_decay": (0.98,),
    "semisfl.labels.decay": (0.999,),
    "semisfl.labels.energy": ("none",),
    "semisfl.labels.least": (ANYTHING,),
    "semisfl.labels.smoothing": (0.1,),
    "semisfl.labels.threshold": ("fixed",),
    "semisfl.server_momentum": (0,),
    "semisfl.sharpness": (0,),
    "wire.gradient_rows": ("all",),
    "wire.updates": ("none",),
}


def without_retired(values: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return nested ``values`` without retired keys that are off; ``known`` keys are settings today."""
    return _without(values, "", {key for key in RETIRED if key not in known})


def _without(values: Mapping[str, Any], prefix: str, retired: Collection[str]) -> dict[str, Any]:
    kept = {}
    for name, value in values.items():
        key = prefix + name
        if isinstance(value, Mapping):
            kept[name] = _without(value, f"{key}.", retired)
        elif key not in retired:
            kept[name] = value
        elif not any(off is ANYTHING or value == off for off in RETIRED[key]):
            raise ConfigError(
                f"{key} = {value!r} is a setting that only version {LAST_VERSION} has; "
                f"remove it, or use semisfl {LAST_VERSION}"
            )
    return kept
