"""Mistakes in settings, as one line of text."""

from collections.abc import Sequence
from types import NoneType
from typing import Any, get_args

from pydantic import ValidationError

MOST = 5
"""Most mistakes in a line; files and messages that nobody here wrote may have any number."""


def one_line(
    error: ValidationError,
    section: type,
    keys: Sequence[str],
    prefix: str = "",
    otherwise: str | None = None,
) -> str:
    """Return the mistakes in ``section`` with their fixes.

    ``keys`` are the settings there are, and ``prefix`` stands before each of them. ``otherwise`` is
    the hint for an unknown key that resembles none; by default it lists them.
    """
    otherwise = otherwise or f"known: {', '.join(keys)}"
    parts = []
    items = error.errors()
    for item in items[:MOST]:
        own = ".".join(str(piece) for piece in item["loc"])
        key, value = prefix + own, f"{item['input']!r:.80}"
        if item["type"] == "extra_forbidden":
            parts.append(f"unknown key {key!r}; {_meant(own, keys, prefix) or otherwise}")
        elif item["type"] == "missing":
            parts.append(f"{key} is missing; set it")
        elif item["type"] == "value_error":
            parts.append(str(item["ctx"]["error"]))
        elif item["type"] == "literal_error":
            parts.append(f"{key} = {value} is not known; use {item['ctx']['expected']}")
        elif item["type"] in ("model_type", "model_attributes_type"):
            parts.append(f"{key} = {value}: {key} is a section; set a key in it")
        else:
            message = item["msg"].removeprefix("Input ").replace("a valid tuple", 'a list, ["..."]')
            if item["type"].startswith(("greater", "less")) and _may_be_none(section, item["loc"]):
                message += ", or none"
            parts.append(f"{key} = {value}: {message[:1].lower()}{message[1:]}")
    if len(items) > MOST:
        parts.append(f"and {len(items) - MOST} more")
    return "; ".join(dict.fromkeys(parts))


def _may_be_none(section: type, location: Sequence[int | str]) -> bool:
    kind: Any = section
    for piece in location:
        field = kind.model_fields.get(piece) if hasattr(kind, "model_fields") else None
        kind = field.annotation if field else None
    return NoneType in get_args(kind)


def _meant(key: str, keys: Sequence[str], prefix: str) -> str | None:
    """Return which setting an unknown key was meant to be; None if it resembles none."""
    import difflib

    if key in keys:  # a program wrote the dots of --set into a dictionary, or a file quotes them
        section, _, own = key.rpartition(".")
        return f"put {own!r} into the section {section!r}"
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    return f"did you mean {prefix + near[0]!r}?" if near else None
