"""Write every table and figure into the pages that have a place for it.

A table stands between ``<!-- table NAME -->`` and ``<!-- end of NAME -->``; the text around it is written
by people. The pages are those of this folder and of ``docs/``.
"""

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from reproduction.paper import drawn, written
from reproduction.paper.exhibits import EXHIBITS
from reproduction.paper.index import RunIndex
from reproduction.tables.results import TABLES
from semisfl.files import write_whole

ROOT = Path(__file__).parent.parent
FOLDERS = (ROOT / "reproduction" / "pages", ROOT / "docs")
PICTURES = FOLDERS[0] / "paper"
PLACE = re.compile(r"(<!-- table (\S+) -->\n)(?:.*?\n)??(<!-- end of \2 -->)", re.DOTALL)


def fill(text: str, make: Callable[[str], str]) -> str:
    """Return a page with ``make(NAME)`` in the place of each table; the rest stays.

    Raises ValueError for a place that is not closed.
    """
    if text.count("<!-- table ") != len(PLACE.findall(text)):
        raise ValueError("a table's place must end with <!-- end of NAME -->")
    return PLACE.sub(lambda place: f"{place[1]}\n{make(place[2]).strip()}\n\n{place[3]}", text)


@cache
def _index() -> RunIndex:
    return RunIndex()


def made(name: str) -> str:
    """Return the table or figure of this name, as Markdown. Raises KeyError if there is none."""
    if name in TABLES:
        return TABLES[name]()
    exhibit, picture = EXHIBITS[name], PICTURES / f"{name}.png"
    parts = written.measured(exhibit, _index())
    shown = f"{PICTURES.name}/{picture.name}" if picture.is_file() else None
    return written.text_of(exhibit, parts, shown, alone=False)


def pages() -> Iterator[tuple[Path, str]]:
    """Yield every page that has a table, with its tables made again."""
    for page in sorted(page for folder in FOLDERS for page in folder.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if PLACE.search(text):
            yield page, fill(text, made)


def write_pages() -> Iterator[Path]:
    """Write every page and picture again; yield each."""
    for page, text in pages():
        for name in PLACE.findall(text):
            if (exhibit := EXHIBITS.get(name[1])) is not None:
                yield from drawn.draw(
                    exhibit, written.measured(exhibit, _index()), PICTURES, ("png",)
                )
        write_whole(page, text.encode())
        yield page
