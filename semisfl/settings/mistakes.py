"""Mistakes in settings, as one line of text."""

from collections.abc import Sequence
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError


def one_line(
    error: ValidationError, section: type[BaseModel], keys: Sequence[str], prefix: str = ""
) -> str:
    """Return every mistake in ``section`` with its fix; ``keys`` are the settings there are."""
    parts = []
    for item in error.errors():
        key = prefix + ".".join(str(piece) for piece in item["loc"])
        if item["type"] == "extra_forbidden":
            parts.append(_unknown(key, keys))
        elif item["type"] == "value_error":
            parts.append(str(item["ctx"]["error"]))
        elif item["type"] == "literal_error":
            parts.append(f"{key} = {item['input']!r} is not known; use {item['ctx']['expected']}")
        elif item["type"] in ("model_type", "model_attributes_type"):
            parts.append(f"{key} = {item['input']!r}: {key} is a section; set a key in it")
        else:
            message = item["msg"].removeprefix("Input ").replace("a valid tuple", 'a list, ["..."]')
            if item["type"].startswith(("greater", "less")) and _may_be_none(section, item["loc"]):
                message += ", or none"
            parts.append(f"{key} = {item['input']!r}: {message[:1].lower()}{message[1:]}")
    return "; ".join(dict.fromkeys(parts))


def _may_be_none(section: type[BaseModel], location: Sequence[int | str]) -> bool:
    kind: Any = section
    for piece in location:
        field = kind.model_fields.get(piece) if hasattr(kind, "model_fields") else None
        kind = field.annotation if field else None
    return NoneType in get_args(kind)


def _unknown(key: str, keys: Sequence[str]) -> str:
    import difflib

    if key in keys:  # a program wrote the dots of --set into a dictionary, or a file quotes them
        section, _, own = key.rpartition(".")
        return f"unknown key {key!r}; put {own!r} into the section {section!r}"
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}?" if near else "`semisfl show digits` lists all keys"
    return f"unknown key {key!r}; {hint}"
