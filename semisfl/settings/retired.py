"""Settings of earlier versions, and what becomes of them. Files that hold them still load.

A moved key is read under its new name. A retired key with a value that meant "off" is dropped,
because today's code does just that. Any other value is refused: the run it describes cannot be
repeated with this version.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from semisfl.settings.sections import ConfigError

LAST_VERSION = "0.1.0"
"""The version that still had the retired settings."""

ANYTHING = object()
"""Stands for every value: the setting only mattered together with another retired one."""

RETIRED: dict[str, Any] = {
    "controller.warm_rounds": 0,
    "controller.warm_steps": ANYTHING,
    "controller.window": 10,
    "data.augment.operations": 2,
    "data.augment.pad": "none",
    "fedmatch.helpers": 2,
    "fedmatch.psi_factor": 0.2,
    "fedmatch.refresh": 10,
    "fedmatch.sparse": False,
    "fedmatch.threshold": 1e-5,
    "fedswitch.controller": False,
    "fedswitch.rule": "student",
    "fl2.clip_norm": 1.0,
    "fl2.eta": 0.01,
    "fl2.global_momentum": 0.5,
    "fl2.pretrain": 10,
    "fl2.rho": 0.1,
    "optimizer.horizon": "none",
    "optimizer.nesterov": True,
    "policy.delta": 1e-5,
    "policy.distance_correlation": 0,
    "policy.epsilon": "none",
    "policy.layers": "none",
    "robust.agreement": 0.5,
    "robust.length": 2.0,
    "runtime.capture": True,
    "semifl.clip_norm": 1.0,
    "semifl.global_momentum": 0.5,
    "semifl.mix_alpha": 0.75,
    "semisfl.clustering_against": "keys",
    "semisfl.labels.adjust": 0,
    "semisfl.labels.below": "unused",
    "semisfl.labels.below_weight": ANYTHING,
    "semisfl.labels.client_decay": 0.98,
    "semisfl.labels.decay": 0.999,
    "semisfl.labels.energy": "none",
    "semisfl.labels.least": ANYTHING,
    "semisfl.labels.smoothing": 0.1,
    "semisfl.labels.threshold": "fixed",
    "semisfl.labels.warmup": 10,
    "semisfl.server_momentum": 0,
    "semisfl.sharpness": 0,
    "teacher.client_batchnorm": "batch",
    "wire.gradient_rows": "all",
    "wire.teacher_once": False,
    "wire.updates": "none",
}
"""Each key with the one value that today's code follows: it meant "off", or is a constant now."""

INSTEAD = {
    "policy.layers": 'write model = "sha256:..." instead, the digest that `semisfl inspect HOST:PORT` prints'
}
"""Retired keys with what replaces them."""

ON_DEVICES: dict[str, tuple[Any, ...]] = {
    "policy.full_models": (True, "none"),
    "policy.hijacking": ("ignore",),
    "policy.model": ([], ()),
    "policy.rounds": ("none",),
    "policy.smallest_batch": (4,),
}
"""Lines of a device's own policy that runs had too, each with the values that asked for nothing."""

MOVED = {
    "teacher.client": ("semisfl.client_teacher",),
    "robust.attackers": ("robust.trimmed_mean.attackers", "robust.krum.attackers"),
    "robust.limit": ("robust.clipped_mean.limit",),
    "semisfl.labels.align": ("semisfl.align",),
    "semisfl.labeled_view": ("server.labeled_view",),
    "fedswitch.labeled_view": ("server.labeled_view",),
}
"""Each key with its new names: the same value counts under every one of them."""

OWN_VIEWS = {
    "semisfl.labeled_view": (("semisfl",), "strong"),
    "fedswitch.labeled_view": (("fedswitch", "fedswitch-sl"), "weak"),
}
"""Moved keys that only these methods read, with the value that is theirs where nothing else is said."""


RETIRED_VALUES = (("semisfl.queue", "balanced"),)
"""Settings of today, each with a value that it could once have."""


def modernised(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested ``values`` with moved keys under their new names, without what is off."""
    result: dict[str, Any] = {}
    # New names first, so that an old key never replaces one that is written out.
    leaves = sorted(_leaves(values), key=lambda leaf: ".".join(leaf[0]) in MOVED)
    for path, value in leaves:
        key = ".".join(path)
        if _off(key, value) or _asks_nothing(key, value):
            continue
        methods, own = OWN_VIEWS.get(key, ((), None))
        if methods and (value == own or values.get("method", "semisfl") not in methods):
            continue
        for name in MOVED.get(key, (None,)):
            _place(result, name.split(".") if name else path, value)
    return result


def policy_without_off(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a policy without retired ones that are off."""
    return {name: value for name, value in values.items() if not _off(f"policy.{name}", value)}


def refuse_lines_of_devices(values: Mapping[str, Any]) -> None:
    """Raise a ConfigError for the first line of a device's policy in the ``values`` of a run."""
    for path, value in _leaves(values):
        if (key := ".".join(path)) in ON_DEVICES and not _asks_nothing(key, value):
            raise ConfigError(
                f"{key} = {value!r} is for the policy of a device (`semisfl join --policy`); "
                "leave it out of a run"
            )


def refuse_retired(values: Mapping[str, Any], where: str = "") -> None:
    """Raise a ConfigError for the first retired key that is not off."""
    for path, value in _leaves(values):
        key = ".".join(path)
        if (key in RETIRED and not _off(key, value)) or (key, value) in RETIRED_VALUES:
            fix = INSTEAD.get(key, f"remove it, or use semisfl {LAST_VERSION}")
            raise ConfigError(
                f"{where}{key} = {value!r} is a setting that only version {LAST_VERSION} has; {fix}"
            )


def without_retired(section: str, values: Any) -> Any:
    """Return the values of a ``section`` without retired keys and values."""
    if not isinstance(values, Mapping):
        return values
    kept = {}
    for name, value in values.items():
        key = f"{section}.{name}"
        if key in RETIRED or (key, value) in RETIRED_VALUES:
            continue
        rest = without_retired(key, value)
        if rest != {} or value == {}:  # a section of retired keys alone is gone too
            kept[name] = rest
    return kept


def _off(key: str, value: Any) -> bool:
    if key not in RETIRED:
        return False
    return RETIRED[key] is ANYTHING or RETIRED[key] == ("none" if value is None else value)


def _asks_nothing(key: str, value: Any) -> bool:
    return ("none" if value is None else value) in ON_DEVICES.get(key, ())


def _leaves(
    values: Mapping[str, Any], above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*above, name))
        else:
            yield (*above, name), value


def _place(values: dict[str, Any], path: tuple[str, ...] | list[str], value: Any) -> None:
    *sections, leaf = path
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            return  # a value where a section should be: validation says so
    values.setdefault(leaf, value)
