"""Pack and unpack a frame's header: plain values only, in one canonical form and within limits."""

import math
import reprlib
from collections.abc import Mapping
from typing import Any

import msgpack

MAX_HEADER = 256 * 1024  # about 4,000 tensors; a hostile header unpacks to 100 times its bytes
MAX_ITEMS = 4096  # in one list or map: msgpack reserves a list's room before it reads the items
MAX_DEPTH = 8  # of lists and maps inside one another

PLAIN = {int, str, bool, bytes, float, dict, list, tuple, type(None)}
"""Types of values that cross as fields."""

Entry = list[Any]
"""A tensor in the header: name, dtype, shape, codec."""


class WireError(ValueError):
    """Raised for a frame that cannot be sent or must be refused; the message is one line."""


def unpack(header: memoryview) -> tuple[str, dict[str, Any], list[Any]]:
    """Return kind, fields and tensor table, checked for size and nothing else."""
    try:
        content = msgpack.unpackb(
            header,
            strict_map_key=True,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException) as error:
        reason = short(str(error) or type(error).__name__)
        raise WireError(f"header is not msgpack within limits: {reason}") from None
    match content:
        case [str(kind), dict(fields), list(table)]:
            return kind, fields, table
    raise WireError("header is not [kind, fields, tensors]")


def pack(kind: str, fields: Mapping[str, Any], table: list[Entry]) -> bytes:
    """Return the header in its canonical form."""
    plain = {name: _plain(value, f"field {name!r}") for name, value in sorted(fields.items())}
    try:
        return msgpack.packb([kind, plain, table])
    except (ValueError, OverflowError) as error:
        raise WireError(f"fields of {kind!r} cannot be packed: {short(str(error))}") from None


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """Return the value with sorted maps; raise WireError if it holds anything but plain finite values."""
    kind = type(value)  # itself: a class derived from it may pack as something else
    if kind not in PLAIN:
        raise WireError(f"{where} holds a {kind.__name__}: only plain values cross")
    if depth > MAX_DEPTH:
        raise WireError(f"{where} is nested deeper than {MAX_DEPTH}")
    if kind is float and not math.isfinite(value):
        raise WireError(f"{where} holds {value}: only finite numbers cross as fields")
    if kind in (dict, list, tuple) and len(value) > MAX_ITEMS:
        raise WireError(f"{where} holds {len(value)} items, more than {MAX_ITEMS}: send a tensor")
    if kind is dict:
        if not all(type(key) is str for key in value):
            raise WireError(f"{where} holds a map with keys that are not strings")
        return {key: _plain(item, where, depth + 1) for key, item in sorted(value.items())}
    if kind in (list, tuple):
        return [_plain(item, where, depth + 1) for item in value]
    return value


def short(value: object) -> str:
    """Return about a hundred printable characters of what another machine sent."""
    return reprlib.repr(value)


def listed(names: Any) -> str:
    """Return the first eight names in one line."""
    names = [str(name) for name in names]
    text = ", ".join(short(name) for name in names[:8])
    return (text or "none") + (", ..." if len(names) > 8 else "")
