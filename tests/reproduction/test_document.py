"""The pages' tables are those of the committed records."""

from pathlib import Path

import pytest

from reproduction import document, records
from reproduction.paper.exhibits import EXHIBITS
from reproduction.tables.results import TABLES

TEXT = """before
<!-- table one -->
old \\1
<!-- end of one -->
between
<!-- table two -->
<!-- end of two -->
after
"""
PLACES = [
    (page, name)
    for folder in document.FOLDERS
    for page in sorted(folder.glob("*.md"))
    for _, name, _ in document.PLACE.findall(page.read_text(encoding="utf-8"))
]


def test_places_are_filled_and_the_rest_stays() -> None:
    filled = document.fill(TEXT, lambda name: f"new {name} \\* \\g<1>\n")
    assert "new one \\* \\g<1>\n" in filled and "old" not in filled
    assert document.fill(filled, lambda name: f"new {name} \\* \\g<1>") == filled
    kept = [line for line in filled.splitlines() if line in ("before", "between", "after")]
    assert kept == ["before", "between", "after"]
    with pytest.raises(ValueError, match="must end with"):
        document.fill(TEXT.replace("<!-- end of one -->", ""), str)


@pytest.mark.parametrize(("page", "name"), PLACES, ids=[name for _, name in PLACES])
def test_a_table_matches_the_records(page: Path, name: str) -> None:
    """Fails if `make results` was not called after a record or the code of a table changed."""
    text = page.read_text(encoding="utf-8")
    (place,) = (found for found in document.PLACE.finditer(text) if found[2] == name)
    assert document.fill(place[0], document.made) == place[0]


def test_every_table_is_on_one_page() -> None:
    names = [name for _, name in PLACES]
    assert len(set(names)) == len(names)
    assert {*TABLES, *(f"table{number}" for number in range(1, 6))} <= set(names)
    assert set(names) <= {*TABLES, *EXHIBITS}


def test_records_are_few_files_and_every_run_has_an_environment() -> None:
    files = list(records.FOLDER.iterdir())
    assert len(files) <= 30 and sum(file.stat().st_size for file in files) <= 10e6
    entries = [one for study in records.studies() for one in records.entries(study)]
    runs = [one for one in entries if "settings" in one and "metrics" in one]
    assert len(runs) > 380 and all(run["environment"] for run in runs)
