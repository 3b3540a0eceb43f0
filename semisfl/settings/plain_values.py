"""Plain values of settings: from a TOML file, and from ``--set``.

Plain values are nested dictionaries of texts, numbers, truth values and lists, as `tomllib` returns them.
Nothing here knows which settings exist: `semisfl.settings.config.parse` does.
"""

import json
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from semisfl.settings.sections import ConfigError


def read(path: Path) -> dict[str, Any]:
    """Return the plain values of a TOML file; raise `ConfigError` if it cannot be read or is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def read_about(weights: str) -> dict[str, Any]:
    """Return layers, cut names, side of images, mean, std, source and licence that `semisfl.table_of` wrote into a file.

    They are empty for any other file or name of ``weights``.
    """
    with (
        suppress(SafetensorError, OSError, ValueError),
        safe_open(Path(weights).expanduser(), framework="numpy") as opened,
    ):
        return dict(json.loads((opened.metadata() or {}).get("backbone", "{}")))
    return {}


def override(
    values: dict[str, Any], assignments: list[str], option: str = "--set"
) -> dict[str, Any]:
    """Return a copy of ``values`` with ``assignments`` applied in order, each ``section.key=value``.

    A value is TOML (``0.1``, ``true``, ``["a"]``) or, if it is none, text. ``option`` is the name of the command's
    option that brought the assignments, for messages. Raises `ConfigError` for text of another form.
    """
    result = deepcopy(values)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{option} {assignment!r} is not key=value, e.g. {option} rounds=10")
        try:
            put(result, key.strip(), _value(text.strip()))
        except ConfigError as error:
            raise ConfigError(f"{option} {assignment!r}: {error}") from None
    return result


def flatten(values: Mapping[str, Any], *, lists: bool = True) -> dict[str, Any]:
    """Return nested values by dotted key. With ``lists`` also those of lists: ``layers[0].kind``; else lists stay values."""
    pairs: dict[str, Any] = {}
    for key, value in values.items():
        inner: Mapping[str, Any] = {}
        if isinstance(value, Mapping):
            inner = {f"{key}.{name}": one for name, one in value.items()}
        elif lists and isinstance(value, list | tuple):
            inner = {f"{key}[{index}]": one for index, one in enumerate(value)}
        else:
            pairs[key] = value
        pairs |= flatten(inner, lists=lists)
    return pairs


def words_of(text: str) -> list[str]:
    """Return the words of ``text`` between its commas, each once and without blanks around it."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set ``value`` in ``values`` at a dotted key, in sections that are made where they are missing."""
    *sections, leaf = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{section!r} is a value, not a section")
    values[leaf] = value


def _value(text: str) -> Any:
    """Return the TOML value of ``text``, or the text itself, so that quotes are optional."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
