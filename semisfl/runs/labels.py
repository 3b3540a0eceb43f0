"""Label configurations for tables and legends: the method, and the settings that tell them apart."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from semisfl.runs.preset_changes import Flat, flat
from semisfl.settings import lookup
from semisfl.settings.config import ConfigError, parse
from semisfl.settings.presets import VARIANTS
from semisfl.settings.robust import section_of

MOST_DIFFERENCES = 4
"""More would not fit a cell of a table or a legend."""
UNSEEN = ("runtime.checkpoint_every", "runtime.evaluate_every", "runtime.best_by")
"""Settings that change no number of a round."""
BESIDE = (*UNSEEN, "stop.target", "stop.patience", "stop.hours", "stop.gigabytes")
"""`UNSEEN`, and settings that change only how many rounds there are."""
VARIANT = "variant"


def alike_but_for_seed(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[int]]]:
    """Return groups of configurations that differ only in their seed: a label, and their places in ``configs``."""
    seedless = [but_for_seed(one) for one in configs]
    complete = in_full(seedless)
    groups = _groups(seedless, complete, [one.get("seed", 0) for one in configs])
    firsts = [complete[places[0]] for places in groups]
    labels = {}
    for method in {first["method"] for first in firsts}:
        rivals = [place for place, first in enumerate(firsts) if first["method"] == method]
        named = _with_variants([firsts[place] for place in rivals])
        for place, mine in zip(rivals, named, strict=True):
            labels[place] = " ".join([lookup.title_of(method), *_differences(mine, named)])
    return [(labels[place], places) for place, places in enumerate(groups)]


def but_for_seed(config: Mapping[str, Any]) -> Flat:
    """Return the values by dotted key, without seed and sinks; ranks of torchrun give what one process does."""
    pairs = flatten({key: item for key, item in config.items() if key not in ("seed", "sinks")})
    return pairs | ({"fleet.kind": "local"} if pairs.get("fleet.kind") == "cluster" else {})


def _groups(
    configs: Sequence[Flat], complete: Sequence[Flat], seeds: Sequence[object]
) -> list[list[int]]:
    """Group places by all settings that matter; by all settings where a seed would be there twice."""
    groups = []
    for places in _by({k: v for k, v in one.items() if k not in UNSEEN} for one in complete):
        if len({seeds[place] for place in places}) == len(places):
            groups.append(places)
        else:
            exactly = _by(configs[place] for place in places)
            groups += [[places[place] for place in same] for same in exactly]
    return groups


def _by(keys: Iterable[Flat]) -> list[list[int]]:
    """Return the places of equal keys, group by group."""
    places: dict[str, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(json.dumps(key, sort_keys=True, default=str), []).append(place)
    return list(places.values())


def in_full(configs: Sequence[Flat]) -> list[Flat]:
    """Return configurations with today's defaults added and the settings of other methods and rules removed."""
    methods = {one["method"] for one in configs}
    defaults = {method: _defaults(method) for method in methods}
    known = methods & lookup.METHODS.all().keys()
    unread = {method: lookup.unread_settings(method) for method in known}
    complete = [defaults[one["method"]] | one for one in configs]
    return [without({*unread.get(one["method"], ()), *_other_rules(one)}, one) for one in complete]


def _other_rules(config: Flat) -> set[str]:
    """Return the sections of the aggregation rules that ``config`` does not choose."""
    chosen = config.get("robust.aggregate", "mean")
    others = (name for name in lookup.AGGREGATES.names() if name != chosen)
    return {f"robust.{section_of(name)}" for name in others}


def without(left_out: Collection[str], config: Flat) -> Flat:
    """Return ``config`` without the settings or whole sections whose dotted keys are in ``left_out``."""
    prefixes = tuple(f"{key}." for key in left_out)
    return {key: item for key, item in config.items() if not f"{key}.".startswith(prefixes)}


def _defaults(method: str) -> Flat:
    if ":" in method:  # to know its settings, its code would have to be imported
        return {}
    try:
        return flatten(parse({"method": method}).model_dump(mode="json", exclude_none=True))
    except ConfigError:  # a name of a package that is not installed here
        return {}


def _with_variants(rivals: Sequence[Flat]) -> list[Flat]:
    """Replace the settings of a variant by its name if each rival has all or none of those that differ."""
    named = [dict(one) for one in rivals]
    for name, change in VARIANTS.items():
        wanted = [flatten(change({"data": {"name": one.get("data.name")}})) for one in rivals]
        has = {
            key: [
                str(one.get(key, "none")) == str(values[key])
                for one, values in zip(named, wanted, strict=True)
            ]
            for key in flatten(change({}))
        }
        settings = [key for key, held in has.items() if not all(held)]
        have = [sum(has[key][place] for key in settings) for place in range(len(named))]
        if len(settings) > 1 and set(have) == {0, len(settings)}:
            named = [
                {key: value for key, value in one.items() if key not in settings}
                | ({VARIANT: name} if count else {})
                for one, count in zip(named, have, strict=True)
            ]
    return named


def _differences(config: Flat, rivals: Sequence[Flat]) -> list[str]:
    """Return the settings that tell a configuration from its rivals: values that at most half of them have.

    If these are too many to read, return as few as suffice, and a mark that there are more.
    """
    # In the order of the file, where the data comes early; rounds have a column of their own.
    keys = list(dict.fromkeys(key for other in rivals for key in other))
    keys.sort(key=lambda key: (key != VARIANT, key == "rounds", key in BESIDE))
    values = {key: [str(other.get(key, "none")) for other in rivals] for key in keys}
    mine = {key: str(config.get(key, "none")) for key in keys}

    def kinds(names: Sequence[str]) -> int:
        return len(set(zip(*(values[name] for name in names), strict=True)))

    before = [key for key in keys if key not in BESIDE]
    if kinds(before) == len(rivals):
        keys = before
    own = [key for key in keys if 2 * values[key].count(mine[key]) <= len(rivals)]
    if mine.get(VARIANT) == "none":
        own = [key for key in own if key != VARIANT]
    more = []
    if len(own) > MOST_DIFFERENCES:
        enough: list[str] = []
        while kinds(enough) < kinds(keys):
            enough.append(max(keys, key=lambda key: kinds([*enough, key])))
        own, more = [key for key in own if key in enough], ["…"]
    return [mine[key] if key == VARIANT else f"{key}={mine[key]}" for key in sorted(own)] + more


def flatten(values: Mapping[str, Any]) -> Flat:
    """Return nested values by dotted key, also those of lists: ``layers[0].kind``."""
    pairs: Flat = {}
    for key, value in flat(values).items():
        if isinstance(value, list):
            pairs |= flatten({f"{key}[{index}]": item for index, item in enumerate(value)})
        else:
            pairs[key] = value
    return pairs
