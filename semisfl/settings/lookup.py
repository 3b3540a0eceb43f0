"""From a name to its row of the catalog, and from a row to its code.

A name is that of a row in `semisfl.settings.catalog`, or of an entry point with which an installed package
adds one (groups ``semisfl.methods``, ``semisfl.data``, ``semisfl.codecs``, ...); a method or a sink
may also be ``package.module:Class``. Nothing is imported before it is needed, and nothing here loads torch.
"""

import importlib
import logging
import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from semisfl.settings import catalog
from semisfl.settings.catalog import NamedAggregate, NamedCodec, NamedData, NamedMethod, NamedSink
from semisfl.settings.sections import ConfigError, Section

log = logging.getLogger(__name__)

Row = TypeVar("Row", NamedMethod, NamedData, NamedCodec, NamedAggregate, NamedSink)
METHOD_NEEDS = ("round", "tested", "state_dict", "load_state_dict")
WORK_NEEDS = ("name", "answers", "start", "step", "finish")
SINK_NEEDS = ("start", "write", "close")
OLD_SINK_NEEDS = ("start", "row", "close")


# --- methods ------------------------------------------------------------------------------------


def methods() -> dict[str, NamedMethod]:
    """Every method that has a name here: the package's, then those of installed packages."""
    return _rows(catalog.METHODS, "semisfl.methods", NamedMethod)


def method(name: str) -> NamedMethod:
    """The row of a method by its name, or by ``package.module:Class``, which is then imported."""
    if (row := _row(name, catalog.METHODS, "semisfl.methods", NamedMethod)) is not None:
        return row
    if ":" in name:
        known = [row for row in methods().values() if row.code == name]
        return known[0] if known else _as_method(load(name), name)
    raise ConfigError(
        f"method = {name!r} is not known; use {', '.join(method_names())}, or package.module:Class"
    )


def method_names() -> list[str]:
    """As `methods`, without importing anything."""
    return [*catalog.METHODS, *_points("semisfl.methods", catalog.METHODS)]


def method_class(row: NamedMethod) -> Any:
    return _having(METHOD_NEEDS, row.code, "method")


def settings_class(entry: NamedMethod | NamedAggregate) -> type[Section] | None:
    """Return the class of the settings of a method or an aggregation rule, or None."""
    if entry.settings is None:
        return None
    loaded = load(entry.settings)
    if not (isinstance(loaded, type) and issubclass(loaded, Section)):
        raise ConfigError(
            f"{entry.settings} is no settings class; derive it from semisfl.settings.sections.Section"
        )
    if isinstance(entry, NamedMethod) and not (entry.section or "").isidentifier():
        raise ConfigError(
            f"method {entry.name!r} has settings but section = {entry.section!r}; give it a name such as 'mine'"
        )
    return loaded


def unread_settings(name: str) -> set[str]:
    """Return the sections that a method does not read: those of the other methods."""
    known = methods()
    sections = {entry.section for entry in known.values() if entry.section is not None}
    return sections - {known[name].section} if name in known else sections


def works(row: NamedMethod) -> dict[str, Any]:
    """A method's client halves, by the names that servers ask for them with."""
    made = [_having(WORK_NEEDS, place, "client half")() for place in row.works]
    return {work.name: work for work in made}


def title_of(name: str) -> str:
    """A method as people write it. A report's runs may be of methods that are not here."""
    row = _by_name(name)
    return row.title if row else name.rpartition(":")[2]


def note_of(name: str) -> str:
    row = _by_name(name)
    return row.note if row else ""


def metrics_class(name: str) -> Any:
    """Return the class of a method's own metrics; None if it has none, or is not known here by its name."""
    entry = _by_name(name)
    return load(entry.metrics) if entry and entry.metrics else None


def _by_name(name: str) -> NamedMethod | None:
    """Nothing is imported because a run's file says so: only rows with a name are looked at."""
    try:
        return _row(name, catalog.METHODS, "semisfl.methods", NamedMethod)
    except ConfigError:
        return None


def _as_method(found: Any, place: str) -> NamedMethod:
    """What a method is found by may be its row, or its class; a class may have its ``row``."""
    if isinstance(found, NamedMethod):
        return found
    if not isinstance(found, type):
        raise ConfigError(f"{place} is {type(found).__name__}, neither a class nor a NamedMethod")
    if isinstance(row := getattr(found, "row", None), NamedMethod):
        return replace(row, code=place)
    summary = (found.__doc__ or "").strip().partition("\n")[0]
    return NamedMethod(name=place, code=place, title=found.__name__, summary=summary)


# --- data sets, codecs and aggregates ------------------------------------------------------------


def data_sets() -> dict[str, NamedData]:
    return _rows(catalog.DATA, "semisfl.data", NamedData)


def data_set(name: str) -> NamedData | None:
    """None: no named set; it may be a path."""
    return _row(name, catalog.DATA, "semisfl.data", NamedData)


def codec_names() -> list[str]:
    return [*catalog.CODECS, *_points("semisfl.codecs", catalog.CODECS)]


def codec(name: str) -> NamedCodec:
    if (row := _row(name, catalog.CODECS, "semisfl.codecs", NamedCodec)) is not None:
        return row
    raise ConfigError(f"codec = {name!r} is not known; use one of {', '.join(codec_names())}")


def aggregate_names() -> list[str]:
    return [*catalog.AGGREGATES, *_points("semisfl.aggregates", catalog.AGGREGATES)]


def aggregate(name: str) -> NamedAggregate:
    if (row := _row(name, catalog.AGGREGATES, "semisfl.aggregates", NamedAggregate)) is not None:
        return row
    raise ConfigError(
        f"robust.aggregate = {name!r} is not known; use one of {', '.join(aggregate_names())}"
    )


# --- sinks --------------------------------------------------------------------------------------


def sinks() -> dict[str, NamedSink]:
    return _rows(catalog.SINKS, "semisfl.sinks", NamedSink)


def sink_names() -> list[str]:
    return [*catalog.SINKS, *_points("semisfl.sinks", catalog.SINKS)]


def check_sink(name: str) -> str:
    """``name``, if there can be such a sink. Nothing is imported: a configuration may be read by who
    does not run it."""
    if name in sink_names() or all(name.partition(":")):
        return name
    raise ConfigError(
        f"sinks: {name!r} is not known; use {', '.join(sink_names())}, or package.module:Class"
    )


def sink(name: str) -> Any:
    """A sink by its name, or by ``package.module:Class``; made without arguments."""
    row = _row(name, catalog.SINKS, "semisfl.sinks", NamedSink)
    try:
        code = row.code if row else check_sink(name)
        needed = OLD_SINK_NEEDS if hasattr(load(code), "row") else SINK_NEEDS
        return _having(needed, code, "sink")()
    except ConfigError as error:
        if row is not None and row.extra is not None:
            raise ConfigError(
                f"sinks: {name!r} needs further packages: pip install 'semisfl[{row.extra}]' ({error})"
            ) from error
        raise


# --- names to code ------------------------------------------------------------------------------


def load(place: str) -> Any:
    """What ``package.module:name`` is."""
    module, _, name = place.partition(":")
    try:
        found = importlib.import_module(module)
    except (
        Exception
    ) as error:  # a module of somebody else's may fail in any way while it is imported
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(
            f"{place!r}: {module} cannot be imported ({reason}); install its package or set PYTHONPATH"
        ) from error
    try:
        return getattr(found, name)
    except AttributeError:
        public = [key for key in vars(found) if not key.startswith("_")]
        raise ConfigError(
            f"{place!r}: {module} has no {name!r}; it has {', '.join(public)}"
        ) from None


def _having(needed: Collection[str], place: str, kind: str) -> Any:
    found = load(place)
    if missing := [name for name in needed if not hasattr(found, name)]:
        raise ConfigError(f"{place} is no {kind}: it lacks {', '.join(missing)}")
    return found


def _points(group: str, built_in: Collection[str]) -> dict[str, EntryPoint]:
    """What installed packages add; a name of ours stays ours."""
    found = _entry_points(group, tuple(sys.path))
    return {point.name: point for point in found if point.name not in built_in}


@cache
def _entry_points(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Read once: it takes 20 ms, and a device asks for every connection."""
    return tuple(entry_points(group=group))


def _row(name: str, built_in: Mapping[str, Row], group: str, kind: type[Row]) -> Row | None:
    if name in built_in:
        return built_in[name]
    point = _points(group, built_in).get(name)
    return _from_point(point, kind) if point else None


def _rows(built_in: Mapping[str, Row], group: str, kind: type[Row]) -> dict[str, Row]:
    rows = dict(built_in)
    for name, point in _points(group, built_in).items():
        try:
            rows[name] = _from_point(point, kind)
        except ConfigError as error:  # somebody else's package must not take ours down
            log.warning("%s is left out: %s", name, error)
    return rows


def _from_point(point: EntryPoint, kind: type[Row]) -> Row:
    found = load(point.value)
    if kind is NamedMethod:
        found = _as_method(found, point.value)
    if not isinstance(found, kind):
        raise ConfigError(f"entry point {point.name} = {point.value} is no {kind.__name__}")
    return replace(found, name=point.name)
