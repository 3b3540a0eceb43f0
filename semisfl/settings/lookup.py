"""Find the catalog entry of a name, and the code of an entry.

Entries are in `semisfl.settings.catalog`; an installed package adds others by entry points (groups
``semisfl.methods``, ``semisfl.data``, ``semisfl.codecs``, ...). A method or a sink may also be named
``package.module:Class``. Nothing is imported before it is needed, and nothing here loads torch.
"""

import importlib
import logging
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from semisfl.settings import catalog
from semisfl.settings.entries import NamedAggregate, NamedCodec, NamedData, NamedMethod, NamedSink
from semisfl.settings.sections import ConfigError, Section

log = logging.getLogger(__name__)

Entry = TypeVar("Entry", NamedMethod, NamedData, NamedCodec, NamedAggregate, NamedSink)
METHOD_NEEDS = ("round", "tested", "state_dict", "load_state_dict")
WORK_NEEDS = ("name", "answers", "start", "step", "finish")
SINK_NEEDS = ("start", "write", "close")


@dataclass(frozen=True)
class Group(Generic[Entry]):
    """The entries of one kind: this package's, then those of installed packages."""

    entry_points: str
    """The group under which other packages name theirs."""
    kind: type[Entry]
    own: Mapping[str, Entry]

    def points(self) -> dict[str, EntryPoint]:
        """Return the entry points of installed packages, except names that this package has."""
        points = _entry_points(self.entry_points, tuple(sys.path))
        return {point.name: point for point in points if point.name not in self.own}

    def names(self) -> list[str]:
        """Return all names without importing anything."""
        return [*self.own, *self.points()]

    def find(self, name: str) -> Entry | None:
        """Return the entry of a name; None if it is not known."""
        if name in self.own:
            return self.own[name]
        point = self.points().get(name)
        return self._load(point) if point else None

    def named(self, name: str, setting: str) -> Entry:
        """Return the entry of the name that ``setting`` has; raise `ConfigError` if it is not known."""
        if (entry := self.find(name)) is None:
            known = ", ".join(self.names())
            raise ConfigError(f"{setting} = {name!r} is not known; use one of {known}")
        return entry

    def all(self) -> dict[str, Entry]:
        """Return the entries by name. One that cannot be loaded is left out, with a warning."""
        entries = dict(self.own)
        for name, point in self.points().items():
            try:
                entries[name] = self._load(point)
            except ConfigError as error:  # somebody else's package must not take ours down
                log.warning("%s is left out: %s", name, error)
        return entries

    def _load(self, point: EntryPoint) -> Entry:
        loaded = load(point.value)
        if self.kind is NamedMethod:
            loaded = _as_method(loaded, point.value)
        if not isinstance(loaded, self.kind):
            raise ConfigError(
                f"entry point {point.name} = {point.value} is no {self.kind.__name__}"
            )
        return replace(loaded, name=point.name)


METHODS = Group("semisfl.methods", NamedMethod, catalog.METHODS)
DATA = Group("semisfl.data", NamedData, catalog.DATA)
CODECS = Group("semisfl.codecs", NamedCodec, catalog.CODECS)
AGGREGATES = Group("semisfl.aggregates", NamedAggregate, catalog.AGGREGATES)
SINKS = Group("semisfl.sinks", NamedSink, catalog.SINKS)


# --- methods ------------------------------------------------------------------------------------


def method(name: str) -> NamedMethod:
    """Return the entry of a method by its name, or by ``package.module:Class``, which is then imported."""
    if (entry := METHODS.find(name)) is not None:
        return entry
    if ":" in name:
        known = [entry for entry in METHODS.all().values() if entry.code == name]
        return known[0] if known else _as_method(load(name), name)
    raise ConfigError(
        f"method = {name!r} is not known; use {', '.join(METHODS.names())}, or package.module:Class"
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
    points = [*METHODS.points().values(), *SINKS.points().values()]
    known = {*METHODS.names(), *(entry.code for entry in entries), *(one.value for one in points)}
    if name not in known and name.partition(":")[0] not in sys.modules:
        raise ConfigError(
            f"{where} names {name:.200}, code that would be imported; if you trust it, add "
            f"--allow-method {name:.200} (in Python: import it first)"
        )


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
    known = METHODS.all()
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
        return METHODS.find(name)
    except ConfigError:
        return None


def _as_method(loaded: Any, place: str) -> NamedMethod:
    """Return the entry of a method from an entry, or from a class, which may have its entry as ``entry``."""
    if isinstance(loaded, NamedMethod):
        return loaded
    if not isinstance(loaded, type):
        raise ConfigError(f"{place} is {type(loaded).__name__}, neither a class nor a NamedMethod")
    if isinstance(entry := getattr(loaded, "entry", None), NamedMethod):
        return replace(entry, code=place)
    if isinstance(getattr(loaded, "row", None), NamedMethod):
        raise ConfigError(f"{place} is of 0.1.0: call its catalog entry `entry`, no longer `row`")
    summary = (loaded.__doc__ or "").strip().partition("\n")[0]
    return NamedMethod(name=place, code=place, title=loaded.__name__, summary=summary)


# --- codecs and aggregates ------------------------------------------------------------


def codec(name: str) -> NamedCodec:
    return CODECS.named(name, "codec")


def aggregate(name: str) -> NamedAggregate:
    return AGGREGATES.named(name, "robust.aggregate")


# --- sinks --------------------------------------------------------------------------------------


def check_sink(name: str) -> str:
    """Return ``name`` if there can be such a sink.

    Nothing is imported, because a configuration may be read where it is not run.
    """
    if name in SINKS.names() or all(name.partition(":")):
        return name
    raise ConfigError(
        f"sinks: {name!r} is not known; use {', '.join(SINKS.names())}, or package.module:Class"
    )


def sink(name: str) -> Any:
    """Return a new sink by its name, or by ``package.module:Class``."""
    entry = SINKS.find(name)
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
    except Exception as error:  # another package's module may fail in any way
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


@cache
def _entry_points(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group. Reading takes 20 ms and a device asks for every connection, so it is cached."""
    return tuple(entry_points(group=group))
