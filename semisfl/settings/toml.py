"""Write a configuration as TOML, for run directories and, with explanations, for `semisfl show`.

What is written reads back as the same configuration: TOML has no null, so a field that is none is left out.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

import tomlkit
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from tomlkit.items import Table

from semisfl.settings.config import Section

EXPLANATION_COLUMN = 32


def to_toml(config: Section) -> str:
    """Return the configuration as TOML, without comments."""
    document = tomlkit.document()
    _fill(document, config.model_dump(), None)
    return tomlkit.dumps(document)


def commented_toml(config: Section) -> str:
    """Return the configuration as TOML with the meaning, range and choices of each field behind it.

    Fields that are none stand there as comments, so that every setting can be seen.
    """
    document = tomlkit.document()
    _fill(document, config.model_dump(), config)
    return tomlkit.dumps(document)


def _fill(
    table: Table | tomlkit.TOMLDocument, values: Mapping[str, Any], explained_by: BaseModel | None
) -> None:
    """Add plain values before tables: what follows a table's header is part of that table in TOML."""
    fields = type(explained_by).model_fields if explained_by else {}
    chosen = explained_by.model_fields_set if explained_by else set()
    tables = {name: value for name, value in values.items() if _is_table(value)}
    for name, value in values.items():
        if name not in tables:
            _add_value(table, name, value, fields.get(name), name in chosen)
    for name, value in tables.items():
        if isinstance(value, Mapping):
            inner = getattr(explained_by, name, None)
            table.add(name, _table(value, inner if isinstance(inner, BaseModel) else None))
            continue
        if name in fields:
            table.add(tomlkit.comment(f"{name}: {_explanation(fields[name])}"))
        tables_of_layers = tomlkit.aot()
        for item in value:
            tables_of_layers.append(_table(item, None))
        table.add(name, tables_of_layers)


def _is_table(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(item, Mapping) for item in value)
    return isinstance(value, Mapping)


def _table(values: Mapping[str, Any], explained_by: BaseModel | None) -> Table:
    table = tomlkit.table()
    _fill(table, values, explained_by)
    return table


def _add_value(
    table: Table | tomlkit.TOMLDocument,
    name: str,
    value: Any,
    field: FieldInfo | None,
    chosen: bool,
) -> None:
    """Add one value; ``field`` explains it (None: no explanation), ``chosen``: the user set it."""
    extra = field.json_schema_extra if field and not chosen else None
    if field and isinstance(extra, dict):
        # A file that does not say it has the default of the command that reads it.
        usual = f"{name} = {tomlkit.item(value).as_string()}".ljust(EXPLANATION_COLUMN - len("# "))
        served = f"`semisfl serve` with three clients or more: {extra['served']}"
        table.add(tomlkit.comment(f"{usual}# {_explanation(field)}; {served}"))
    elif value is not None:
        item = tomlkit.item(list(value) if isinstance(value, tuple) else value)
        if field:
            item.comment(_explanation(field))
            width = len(f"{name} = {item.as_string()}")
            item.trivia.comment_ws = " " * max(1, EXPLANATION_COLUMN - width)
        table.add(name, item)
    elif field:  # TOML has no null: a field left out means none
        unset = f"{name} = none".ljust(EXPLANATION_COLUMN - len("# "))
        table.add(tomlkit.comment(f"{unset}# {_explanation(field)}"))


def _explanation(field: FieldInfo) -> str:
    """Return the meaning of a field, with its choices if it has a fixed list of them."""
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    return f"{field.description}" + (f" ({' | '.join(map(str, choices))})" if choices else "")
