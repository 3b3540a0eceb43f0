"""Run the same methods with several values of a setting, or with named variants; tabulate and draw them."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semisfl.runs.grouping import Group
from semisfl.runs.labels import UNSEEN, but_for_seed, in_full
from semisfl.runs.report import Spread, Summary, accuracy_of
from semisfl.settings import config as configs
from semisfl.settings.lookup import title_of
from semisfl.settings.plain_values import words_of
from semisfl.settings.sections import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOT_SWEPT = {
    "method": "use --methods",
    "seed": "use --seeds",
    "sinks": "it changes nothing of what a run computes",
}
MOST_KEYS = 2
"""Runs that differ in more keys are not taken for a sweep."""
LOGARITHMIC_FROM = 8.0
"""The x axis is logarithmic if the largest value is so many times the smallest."""


@dataclass(frozen=True)
class Sweep:
    """A setting and the values it takes, as text."""

    key: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Sweep":
        key, equals, values = text.partition("=")
        chosen = tuple(words_of(values))
        if not equals or not key.strip() or not chosen:
            raise ConfigError(
                f"--sweep {text!r} is not KEY=V1,V2,..., e.g. --sweep data.labeled=10,20,40"
            )
        if why := NOT_SWEPT.get(key.strip()):
            raise ConfigError(f"--sweep {text!r}: {key.strip()} cannot be swept; {why}")
        return cls(key.strip(), chosen)


@dataclass(frozen=True)
class Variant:
    """A named group of settings: of `compare --variants`, or one value of each swept setting."""

    name: str = ""
    assignments: tuple[str, ...] = ()
    """``key=value`` each, as ``--set`` takes them."""


PLAIN = Variant()


def grid(sweeps: Sequence[Sweep]) -> list[Variant]:
    """Return a variant for every combination of values, named for a directory; `PLAIN` alone if nothing is swept."""
    if len({sweep.key for sweep in sweeps}) < len(sweeps):
        raise ConfigError("--sweep names a key twice; give all its values at once")
    pairs = [[(sweep.key, value) for value in sweep.values] for sweep in sweeps]
    variants = []
    for settings in itertools.product(*pairs):
        name = "-".join(f"{key}-{value}" for key, value in settings)
        assignments = tuple(f"{key}={value}" for key, value in settings)
        variants.append(Variant(re.sub(r"[^A-Za-z0-9._+-]", "_", name), assignments))
    return variants


def read_variants(path: Path) -> list[Variant]:
    """Read named variants from a TOML file: ``name = ["key=value", ...]``; ``[]`` is the preset as it is."""
    variants = []
    for name, settings in configs.read(path).items():
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise ConfigError(
                f"{path}: variant {name!r} names run directories; use letters, digits, _ and -"
            )
        if not isinstance(settings, list) or not all(isinstance(one, str) for one in settings):
            raise ConfigError(
                f'{path}: variant {name} = {settings!r} is not a list of "key=value"; '
                f'e.g. {name} = ["rounds=10"]'
            )
        for key, why in (("method", "--methods"), ("seed", "--seeds")):
            if any(one.partition("=")[0].strip() == key for one in settings):
                raise ConfigError(f"{path}: variant {name} sets {key}; use {why}")
        variants.append(Variant(name, tuple(settings)))
    if not variants:
        raise ConfigError(f'{path} names no variant, e.g. quick = ["rounds=10"]')
    return variants


@dataclass(frozen=True)
class Line:
    """Accuracies over one setting's values; everything else about their runs is alike."""

    label: str
    method: str
    points: dict[str, Spread]


@dataclass(frozen=True)
class Swept:
    """Results by the value of a setting."""

    key: str
    values: list[str]
    lines: list[Line]
    accuracy: str
    """The name of the accuracies."""

    @classmethod
    def of(cls, results: Sequence[tuple[Group, Summary]], keys: Sequence[str]) -> "Swept":
        """Return the results by value of the first of ``keys``; each line has its own values of the others."""
        first, *others = keys
        lines: dict[str, Line] = {}
        configs = [but_for_seed(group.runs[0].config) for group, _ in results]
        for (group, summary), config, own in zip(results, configs, in_full(configs), strict=True):
            apart = (f"{key}={_value(own, key)}" for key in others if key in own)
            named = [group.variant] if group.variant else []
            label = " ".join([title_of(group.method), *named, *apart])
            line = lines.setdefault(label, Line(label, group.method, {}))
            line.points[_value(config, first)] = summary.accuracy
        values = {value for line in lines.values() for value in line.points}
        called = accuracy_of(summary.judged_on for _, summary in results)
        return cls(first, sorted(values, key=_order), list(lines.values()), called)


def as_json(swept: Swept) -> dict[str, Any]:
    """Return the results as plain values."""
    lines = [
        {
            "label": line.label,
            "method": line.method,
            "accuracy": {value: vars(spread) for value, spread in line.points.items()},
        }
        for line in swept.lines
    ]
    return {"key": swept.key, "values": swept.values, "lines": lines}


def keys_swept(groups: Sequence[Group]) -> list[str]:
    """Return the settings in which runs of one method differ; none if there are more than `MOST_KEYS`."""
    configs = in_full([but_for_seed(group.runs[0].config) for group in groups])
    by_method: dict[str, list[Mapping[str, Any]]] = {}
    for config in configs:
        by_method.setdefault(config["method"], []).append(config)
    differing = dict.fromkeys(
        key
        for alike in by_method.values()
        for key in dict.fromkeys(name for config in alike for name in config)
        if key not in UNSEEN and len({_value(config, key) for config in alike}) > 1
    )
    return list(differing) if len(differing) <= MOST_KEYS else []


def _value(config: Mapping[str, Any], key: str) -> str:
    return str(config.get(key, "none"))


def _number(value: str) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _order(value: str) -> tuple[bool, float, str]:
    """Return a sort key: numbers by size, then words."""
    number = _number(value)
    return (number is None, number or 0.0, value)


def picture(swept: Swept) -> "Figure":
    """Draw accuracy over the values: means, with bars of one standard error if there are several seeds."""
    from matplotlib.figure import Figure  # heavy, and only wanted here

    figure = Figure(figsize=(7.0, 4.4), layout="constrained")
    axes = figure.subplots()
    numbers = [_number(value) for value in swept.values]
    known = [number for number in numbers if number is not None]
    scaled = len(known) == len(numbers)
    places = known if scaled else [float(place) for place in range(len(numbers))]
    for line in swept.lines:
        there = [
            (place, line.points[value])
            for place, value in zip(places, swept.values, strict=True)
            if value in line.points
        ]
        axes.errorbar(
            [place for place, _ in there],
            [spread.mean for _, spread in there],
            [spread.stderr or 0.0 for _, spread in there],
            marker="o",
            markersize=4,
            lw=1.5,
            capsize=3,
            label=line.label,
        )
    if scaled and min(places) > 0 and max(places) >= LOGARITHMIC_FROM * min(places):
        axes.set_xscale("log")
        axes.minorticks_off()
    axes.set_xticks(places, swept.values)
    axes.set_xlabel(swept.key)
    axes.set_ylabel(f"{swept.accuracy} (%)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    return figure
