"""A configuration as TOML: what run directories keep, and what `semisfl show` explains."""

from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

import tomlkit
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from tomlkit.items import Table

from semisfl.settings.config import Section

EXPLANATION_COLUMN = 32


def to_toml(config: Section) -> str:
    """The configuration as TOML; fields that are none are left out, which means the same."""
    document = tomlkit.document()
    _fill(document, config.model_dump(), None)
    return tomlkit.dumps(document)


def commented_toml(config: Section) -> str:
    """The same with a line of explanation per field; saved to a file, it gives ``config`` back."""
    document = tomlkit.document()
    _fill(document, config.model_dump(), config)
    return tomlkit.dumps(document)


def _fill(
    table: Table | tomlkit.TOMLDocument, values: Mapping[str, Any], explained_by: BaseModel | None
) -> None:
    """Plain values before tables: TOML counts what follows a table's header as part of it."""
    fields = type(explained_by).model_fields if explained_by else {}
    tables = {name: value for name, value in values.items() if _is_table(value)}
    for name, value in values.items():
        if name not in tables:
            _add_value(table, name, value, fields.get(name))
    for name, value in tables.items():
        if isinstance(value, Mapping):
            inner = getattr(explained_by, name, None)
            table.add(name, _table(value, inner if isinstance(inner, BaseModel) else None))
            continue
        if name in fields:
            table.add(tomlkit.comment(f"{name}: {_explanation(fields[name])}"))
        rows = tomlkit.aot()
        for row in value:
            rows.append(_table(row, None))
        table.add(name, rows)


def _is_table(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(item, Mapping) for item in value)
    return isinstance(value, Mapping)


def _table(values: Mapping[str, Any], explained_by: BaseModel | None) -> Table:
    table = tomlkit.table()
    _fill(table, values, explained_by)
    return table


def _add_value(
    table: Table | tomlkit.TOMLDocument, name: str, value: Any, field: FieldInfo | None
) -> None:
    if value is not None:
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
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    return f"{field.description}" + (f" ({' | '.join(map(str, choices))})" if choices else "")
