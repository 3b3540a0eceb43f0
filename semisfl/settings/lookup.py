"""Find the catalog entry of a name, and the code of an entry.

Entries are in `semisfl.settings.catalog`; an installed package adds others by entry points (groups
``semisfl.methods``, ``semisfl.data``, ``semisfl.codecs``, ...). A method or a sink may also be named
``package.module:Class``. Nothing is imported before it is needed, and nothing here loads torch.
"""

import importlib
import logging
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from semisfl.settings import catalog
from semisfl.settings.entries import NamedAggregate, NamedCodec, NamedData, NamedMethod, NamedSink
from semisfl.settings.sections import ConfigError, Section

log = logging.getLogger(__name__)

Entry = TypeVar("Entry", NamedMethod, NamedData, NamedCodec, NamedAggregate, NamedSink)
METHOD_NEEDS = ("round", "tested", "state_dict", "load_state_dict")
WORK_NEEDS = ("name", "answers", "start", "step", "finish")
SINK_NEEDS = ("start", "write", "close")


# --- methods ------------------------------------------------------------------------------------


def methods() -> dict[str, NamedMethod]:
    """Return every method with a name: this package's, then those of installed packages."""
    return _entries(catalog.METHODS, "semisfl.methods", NamedMethod)


def method(name: str) -> NamedMethod:
    """Return the entry of a method by its name, or by ``package.module:Class``, which is then imported."""
    if (entry := _entry(name, catalog.METHODS, "semisfl.methods", NamedMethod)) is not None:
        return entry
    if ":" in name:
        known = [entry for entry in methods().values() if entry.code == name]
        return known[0] if known else _as_method(load(name), name)
    raise ConfigError(
        f"method = {name!r} is not known; use {', '.join(method_names())}, or package.module:Class"
    )


_allowed: set[str] = set()


def allow_methods(names: Iterable[str]) -> None:
    """Let runs that are read in this process name these methods and sinks, as ``package.module:Class``."""
    _allowed.update(names)


def check_importable(name: object, where: str) -> None:
    """Raise `ConfigError` if reading a run would import code that nobody here asked for.

    A run's directory may come from somebody else, and importing a module runs it.
    """
    if not isinstance(name, str) or ":" not in name or name in _allowed:
        return
    entries: list[NamedMethod | NamedSink]
    entries = [*catalog.METHODS.values(), *catalog.SINKS.values()]
    points = {
        *_points("semisfl.methods", catalog.METHODS).values(),
        *_points("semisfl.sinks", catalog.SINKS).values(),
    }
    known = {*method_names(), *(entry.code for entry in entries), *(one.value for one in points)}
    if name not in known and name.partition(":")[0] not in sys.modules:
        raise ConfigError(
            f"{where} names {name:.200}, code that would be imported; if you trust it, add "
            f"--allow-method {name:.200} (in Python: import it first)"
        )


def method_names() -> list[str]:
    """Return the names of `methods` without importing anything."""
    return [*catalog.METHODS, *_points("semisfl.methods", catalog.METHODS)]


def method_class(entry: NamedMethod) -> Any:
    return _having(METHOD_NEEDS, entry.code, "method")


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
    own = {entry.section for key, entry in known.items() if name in (key, entry.code)}
    return {entry.section for entry in known.values() if entry.section is not None} - own


def works(entry: NamedMethod) -> dict[str, Any]:
    """Return a method's client halves, by the names that servers use for them."""
    made = [_having(WORK_NEEDS, place, "client half")() for place in entry.works]
    return {work.name: work for work in made}


def title_of(name: str) -> str:
    """Return a method's name as people write it. A report may have runs of methods that are not installed."""
    entry = _by_name(name)
    return entry.title if entry else name.rpartition(":")[2]


def note_of(name: str) -> str:
    entry = _by_name(name)
    return entry.note if entry else ""


def metrics_class(name: str) -> Any:
    """Return the class of a method's own metrics; None if it has none, or is not known here by its name."""
    entry = _by_name(name)
    return load(entry.metrics) if entry and entry.metrics else None


def _by_name(name: str) -> NamedMethod | None:
    """Return the entry of a name, or None. A run's file alone makes nothing be imported."""
    try:
        return _entry(name, catalog.METHODS, "semisfl.methods", NamedMethod)
    except ConfigError:
        return None


def _as_method(loaded: Any, place: str) -> NamedMethod:
    """Return the entry of a method from an entry, or from a class, which may have its entry as ``row``."""
    if isinstance(loaded, NamedMethod):
        return loaded
    if not isinstance(loaded, type):
        raise ConfigError(f"{place} is {type(loaded).__name__}, neither a class nor a NamedMethod")
    if isinstance(entry := getattr(loaded, "row", None), NamedMethod):
        return replace(entry, code=place)
    summary = (loaded.__doc__ or "").strip().partition("\n")[0]
    return NamedMethod(name=place, code=place, title=loaded.__name__, summary=summary)


# --- data sets, codecs and aggregates ------------------------------------------------------------


def data_sets() -> dict[str, NamedData]:
    return _entries(catalog.DATA, "semisfl.data", NamedData)


def data_set(name: str) -> NamedData | None:
    """Return the entry of a data set; None if the name is not known, as it may be a path."""
    return _entry(name, catalog.DATA, "semisfl.data", NamedData)


def codecs() -> dict[str, NamedCodec]:
    return _entries(catalog.CODECS, "semisfl.codecs", NamedCodec)


def codec_names() -> list[str]:
    return [*catalog.CODECS, *_points("semisfl.codecs", catalog.CODECS)]


def codec(name: str) -> NamedCodec:
    if (entry := _entry(name, catalog.CODECS, "semisfl.codecs", NamedCodec)) is not None:
        return entry
    raise ConfigError(f"codec = {name!r} is not known; use one of {', '.join(codec_names())}")


def aggregates() -> dict[str, NamedAggregate]:
    return _entries(catalog.AGGREGATES, "semisfl.aggregates", NamedAggregate)


def aggregate_names() -> list[str]:
    return [*catalog.AGGREGATES, *_points("semisfl.aggregates", catalog.AGGREGATES)]


def aggregate(name: str) -> NamedAggregate:
    if (
        entry := _entry(name, catalog.AGGREGATES, "semisfl.aggregates", NamedAggregate)
    ) is not None:
        return entry
    raise ConfigError(
        f"robust.aggregate = {name!r} is not known; use one of {', '.join(aggregate_names())}"
    )


# --- sinks --------------------------------------------------------------------------------------


def sinks() -> dict[str, NamedSink]:
    return _entries(catalog.SINKS, "semisfl.sinks", NamedSink)


def sink_names() -> list[str]:
    return [*catalog.SINKS, *_points("semisfl.sinks", catalog.SINKS)]


def check_sink(name: str) -> str:
    """Return ``name`` if there can be such a sink.

    Nothing is imported, because a configuration may be read where it is not run.
    """
    if name in sink_names() or all(name.partition(":")):
        return name
    raise ConfigError(
        f"sinks: {name!r} is not known; use {', '.join(sink_names())}, or package.module:Class"
    )


def sink(name: str) -> Any:
    """Return a new sink by its name, or by ``package.module:Class``."""
    entry = _entry(name, catalog.SINKS, "semisfl.sinks", NamedSink)
    try:
        code = entry.code if entry else check_sink(name)
        return _having(SINK_NEEDS, code, "sink")()
    except ConfigError as error:
        if entry is not None and entry.extra is not None:
            raise ConfigError(
                f"sinks: {name!r} needs further packages: pip install 'semisfl[{entry.extra}]' ({error})"
            ) from error
        raise


# --- names to code ------------------------------------------------------------------------------


def load(place: str) -> Any:
    """Return the object at ``package.module:name``."""
    module, _, name = place.partition(":")
    try:
        loaded = importlib.import_module(module)
    except (
        Exception
    ) as error:  # a module of somebody else's may fail in any way while it is imported
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(
            f"{place!r}: {module} cannot be imported ({reason}); install its package or set PYTHONPATH"
        ) from error
    try:
        return getattr(loaded, name)
    except AttributeError:
        public = [key for key in vars(loaded) if not key.startswith("_")]
        raise ConfigError(
            f"{place!r}: {module} has no {name!r}; it has {', '.join(public)}"
        ) from None


def _having(needed: Collection[str], place: str, kind: str) -> Any:
    loaded = load(place)
    if missing := [name for name in needed if not hasattr(loaded, name)]:
        raise ConfigError(f"{place} is no {kind}: it lacks {', '.join(missing)}")
    return loaded


def _points(group: str, built_in: Collection[str]) -> dict[str, EntryPoint]:
    """Return the entry points of installed packages, except names that this package has."""
    loaded = _entry_points(group, tuple(sys.path))
    return {point.name: point for point in loaded if point.name not in built_in}


@cache
def _entry_points(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group. Reading takes 20 ms and a device asks for every connection, so it is cached."""
    return tuple(entry_points(group=group))


def _entry(name: str, built_in: Mapping[str, Entry], group: str, kind: type[Entry]) -> Entry | None:
    if name in built_in:
        return built_in[name]
    point = _points(group, built_in).get(name)
    return _from_point(point, kind) if point else None


def _entries(built_in: Mapping[str, Entry], group: str, kind: type[Entry]) -> dict[str, Entry]:
    entries = dict(built_in)
    for name, point in _points(group, built_in).items():
        try:
            entries[name] = _from_point(point, kind)
        except ConfigError as error:  # somebody else's package must not take ours down
            log.warning("%s is left out: %s", name, error)
    return entries


def _from_point(point: EntryPoint, kind: type[Entry]) -> Entry:
    loaded = load(point.value)
    if kind is NamedMethod:
        loaded = _as_method(loaded, point.value)
    if not isinstance(loaded, kind):
        raise ConfigError(f"entry point {point.name} = {point.value} is no {kind.__name__}")
    return replace(loaded, name=point.name)
