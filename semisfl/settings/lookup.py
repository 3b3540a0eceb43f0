"""Find the catalog entry of a name, and the code of an entry.

A name is a key of the tables in `semisfl.settings.catalog`, or ``package.module:NAME`` in any package that is
installed or on PYTHONPATH. Nothing is imported before it is needed, and nothing here loads torch.

To import a module runs it. Names in a configuration that somebody else wrote (a run's directory, a server's
terms) are therefore checked by `check_importable` before they are looked up.
"""

import importlib
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from semisfl.settings import catalog
from semisfl.settings.catalog import NamedAggregate, NamedCodec, NamedData, NamedMethod
from semisfl.settings.plain_values import read_about
from semisfl.settings.sections import ConfigError, Section

Entry = TypeVar("Entry", NamedMethod, NamedData, NamedCodec, NamedAggregate)
CODE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""The form of a name outside the catalog: ``package.module:NAME``."""


# --- entries --------------------------------------------------------------------------------------


def check_name(name: str, table: Mapping[str, Any], setting: str) -> str:
    """Return ``name`` if ``table`` has it or another package may have it; nothing is imported.

    ``setting`` is the key that has this value, for the error. Raises `ConfigError` with the known names.
    """
    if name in table or CODE.fullmatch(name):
        return name
    known = ", ".join(table)
    raise ConfigError(f"{setting} = {name!r} is not known; use {known}, or package.module:NAME")


def _entry(name: str, table: Mapping[str, Entry], kind: type[Entry], setting: str) -> Entry:
    """Return the entry of a name: the table's, or one of another package.

    A class there may have its entry as the attribute ``entry``.
    """
    if name in table:
        return table[name]
    loaded = load(check_name(name, table, setting))
    entry = loaded if isinstance(loaded, kind) else getattr(loaded, "entry", None)
    if not isinstance(entry, kind):
        raise ConfigError(
            f"{setting} = {name!r} is no {kind.__name__}, and has none as its attribute `entry`"
        )
    return entry


def method(name: str) -> NamedMethod:
    """Return the entry of a method; raise `ConfigError` for an unknown name.

    A class of another package may have no entry: it then has no settings, no cost formula and no client half, and
    its own name as title.
    """
    entry = catalog.METHODS.get(name)
    if entry is None and isinstance(
        loaded := load(check_name(name, catalog.METHODS, "method")), type
    ):
        summary = (loaded.__doc__ or "").strip().partition("\n")[0]
        bare = NamedMethod(name=name, code=name, title=loaded.__name__, summary=summary)
        entry = replace(getattr(loaded, "entry", bare), code=name)
    return entry or _entry(name, catalog.METHODS, NamedMethod, "method")


def data(name: str) -> NamedData | None:
    """Return the entry of a data set; None for any other text, such as a path to images."""
    if name in catalog.DATA or (CODE.fullmatch(name) and not Path(name).exists()):
        return _entry(name, catalog.DATA, NamedData, "data.name")
    return None


def codec(name: str) -> NamedCodec:
    """Return the entry of a codec; raise `ConfigError` for an unknown name."""
    return _entry(name, catalog.CODECS, NamedCodec, "codec")


def aggregate(name: str) -> NamedAggregate:
    """Return the entry of an aggregation rule; raise `ConfigError` for an unknown name."""
    return _entry(name, catalog.AGGREGATES, NamedAggregate, "robust.aggregate")


def title_of(name: str) -> str:
    """Return a method's name as people write it. A report may have runs of methods that are not installed."""
    entry = _without_import(name)
    return entry.title if entry else name.rpartition(":")[2]


def origin_of(weights: str) -> str | None:
    """Return source and licence of what ``model.weights`` names; None: its file does not say."""
    if entry := catalog.WEIGHTS.get(weights):
        return f"{entry.summary}, licence: {entry.licence}"
    return read_about(weights).get("origin")


def note_of(name: str) -> str:
    """Return what is to be said wherever a method's numbers are; empty for a method that is not known here."""
    entry = _without_import(name)
    return entry.note if entry else ""


def metrics_class(name: str) -> Any:
    """Return the class of a method's own metrics; None if it has none, or is not known here."""
    entry = _without_import(name)
    return load(entry.metrics) if entry and entry.metrics else None


def _without_import(name: str) -> NamedMethod | None:
    """Return the entry of a method; None if a module would have to be imported for it."""
    known = name in catalog.METHODS or name.partition(":")[0] in sys.modules
    return method(name) if known else None


def unread_settings(name: str) -> set[str]:
    """Return the sections that a method does not read: those of the catalog's other methods."""
    entry = _without_import(name)
    sections = {one.section for one in catalog.METHODS.values() if one.section is not None}
    return sections - {entry.section if entry else None}


# --- the code of an entry ---------------------------------------------------------------------------


def load(place: str) -> Any:
    """Return the object at ``package.module:name``; raise `ConfigError` if it cannot be imported."""
    module, _, name = place.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # another package's module may fail in any way
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(
            f"{place!r} cannot be imported ({reason}); install its package or set PYTHONPATH"
        ) from error


def settings_class(entry: NamedMethod | NamedAggregate) -> type[Section] | None:
    """Return the class of the settings of a method or an aggregation rule; None if it has none.

    Its module loads no torch, so that a configuration can be read where nothing is trained.
    """
    return None if entry.settings is None else load(entry.settings)


def works(entry: NamedMethod) -> dict[str, Any]:
    """Return a method's client halves (`semisfl.fleet.base.ClientWork`), by the names that servers use for them."""
    made = [load(place)() for place in entry.works]
    return {work.name: work for work in made}


def sink(name: str) -> Any:
    """Return a new sink; raise `ValueError` with the extra to install if its package is missing."""
    entry = catalog.SINKS.get(name)
    if entry is None:
        return load(check_name(name, catalog.SINKS, "sinks"))()
    try:
        return load(entry.code)()
    except ConfigError as error:
        if entry.extra is None:
            raise
        raise missing(entry.extra, str(error)) from error


@contextmanager
def needs(extra: str, *packages: str) -> Iterator[None]:
    """Import packages inside the block; raise `ValueError` with the extra that installs one of ``packages``."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").split(".")[0] in packages:
            raise missing(extra, f"no module {error.name!r}") from error
        raise


def missing(extra: str, reason: str) -> ValueError:
    """Return the error for a module that ``extra`` of this package installs."""
    return ValueError(f"this needs further packages: pip install 'semisfl[{extra}]' ({reason})")


# --- names that somebody else wrote -----------------------------------------------------------------

_allowed: set[str] = set()


def allow_code(names: Iterable[str]) -> None:
    """Let configurations that somebody else wrote name this code in this process, as ``package.module:NAME``."""
    _allowed.update(names)


def check_importable(values: Any, where: str, allowed: Collection[str] = ()) -> None:
    """Raise `ConfigError` if settings name code that nobody here asked for; ``where`` they come from.

    ``values`` are the plain values of a configuration, or any part of them. ``allowed``: further names that
    may be imported.
    """
    if isinstance(values, Mapping):
        values = list(values.values())
    if isinstance(values, list | tuple):
        for value in values:
            check_importable(value, where, allowed)
    elif isinstance(values, str) and CODE.fullmatch(values) and values not in {*_allowed, *allowed}:
        module = values.partition(":")[0]
        if module not in sys.modules and not module.startswith("semisfl."):
            raise ConfigError(
                f"{where} names {values:.200}, code that would be imported; if you trust it, add "
                f"--allow-method {values:.200} (in Python: import it first)"
            )
