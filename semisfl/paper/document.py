"""Fill the tables in a document that people write: the text between two marks is made from runs.

``<!-- semisfl reproduce table1 -->`` begins such a part; ``<!-- end of table1 -->`` ends it.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from semisfl.settings.config import ConfigError

BEGIN = re.compile(r"^<!-- semisfl reproduce (\S+) -->$", re.MULTILINE)


def table_lines(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return [lines[0], "|" + "---|" * len(head), *lines[1:]]


def names_in(text: str, file: Path) -> list[str]:
    """Return the names of the parts in a document, in their order."""
    names = BEGIN.findall(text)
    if not names:
        raise ConfigError(
            f"{file} has no line like <!-- semisfl reproduce table1 --> to fill in; add one per table"
        )
    for name in names:
        if len(re.findall(_part(name), text)) != 1:
            raise ConfigError(
                f"{file} must have one part for {name}, closed by <!-- end of {name} -->"
            )
    return names


def filled(
    text: str, make: Callable[[str], str], names: list[str], command: str = "semisfl reproduce"
) -> str:
    """Return the document with ``make(name)`` between the marks of each name; the rest stays."""
    for name in names:
        part = re.search(_part(name, command), text)
        assert part is not None, f"the document has no part {name}"
        made = f"{part[1]}\n\n{make(name).strip()}\n\n{part[2]}"
        text = text[: part.start()] + made + text[part.end() :]
    return text


def _part(name: str, command: str = "semisfl reproduce") -> str:
    exact = re.escape(name)
    return rf"(<!-- {command} {exact} -->)(?s:.*?)(<!-- end of {exact} -->)"
