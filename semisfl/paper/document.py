"""Tables inside a document that people write: what lies between two marks is made again from runs.

``<!-- semisfl reproduce table1 -->`` begins such a part, ``<!-- end of table1 -->`` ends it.
"""

import re
from collections.abc import Callable
from pathlib import Path

from semisfl.settings.config import ConfigError

BEGIN = re.compile(r"^<!-- semisfl reproduce (\S+) -->$", re.MULTILINE)


def names_in(text: str, file: Path) -> list[str]:
    """What a document has parts for."""
    names = BEGIN.findall(text)
    if not names:
        raise ConfigError(f"{file} has no line like <!-- semisfl reproduce table1 --> to fill in")
    for name in names:
        if len(re.findall(_part(name), text)) != 1:
            raise ConfigError(
                f"{file} must have one part for {name}, closed by <!-- end of {name} -->"
            )
    return names


def filled(
    text: str, make: Callable[[str], str], names: list[str], command: str = "semisfl reproduce"
) -> str:
    """The document with ``make(name)`` between the marks of each name; all else stays."""
    for name in names:
        found = re.search(_part(name, command), text)
        assert found is not None, f"the document has no part {name}"
        made = f"{found[1]}\n\n{make(name).strip()}\n\n{found[2]}"
        text = text[: found.start()] + made + text[found.end() :]
    return text


def _part(name: str, command: str = "semisfl reproduce") -> str:
    exact = re.escape(name)
    return rf"(<!-- {command} {exact} -->)(?s:.*?)(<!-- end of {exact} -->)"
