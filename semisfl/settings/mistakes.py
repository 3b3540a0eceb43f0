"""Mistakes in settings, as one line of text."""

from collections.abc import Sequence

from pydantic import ValidationError


def one_line(error: ValidationError, keys: Sequence[str], prefix: str = "") -> str:
    """Return every mistake of ``error`` with its fix; ``keys`` are the settings there are."""
    parts = []
    for item in error.errors():
        key = prefix + ".".join(str(piece) for piece in item["loc"])
        if item["type"] == "extra_forbidden":
            parts.append(_unknown(key, keys))
        elif item["type"] == "value_error":
            parts.append(str(item["ctx"]["error"]))
        elif item["type"] == "literal_error":
            parts.append(f"{key} = {item['input']!r} is not known; use {item['ctx']['expected']}")
        else:
            message = item["msg"].removeprefix("Input ")
            parts.append(f"{key} = {item['input']!r}: {message[:1].lower()}{message[1:]}")
    return "; ".join(dict.fromkeys(parts))


def _unknown(key: str, keys: Sequence[str]) -> str:
    import difflib

    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}?" if near else "`semisfl show digits` lists all keys"
    return f"unknown key {key!r}; {hint}"
