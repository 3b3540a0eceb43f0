"""Documents whose tables are made again from runs, and ours, which must be as the runs say."""

from pathlib import Path

import pytest

from semisfl.paper import document, written
from semisfl.paper.exhibits import EXHIBITS
from semisfl.paper.records import Records
from semisfl.settings.config import ConfigError

ROOT = Path(__file__).parents[2]
FILE = Path("some.md")
TEXT = """before
<!-- semisfl reproduce table1 -->
old \\1
<!-- end of table1 -->
between
<!-- semisfl reproduce fig8 -->
<!-- end of fig8 -->
after
"""


def test_parts_are_filled_and_all_else_stays() -> None:
    names = document.names_in(TEXT, FILE)
    assert names == ["table1", "fig8"]
    filled = document.filled(TEXT, lambda name: f"new {name} \\* \\g<1>\n", names)
    assert "new table1 \\* \\g<1>\n" in filled and "old" not in filled
    assert document.filled(filled, lambda name: f"new {name} \\* \\g<1>", names) == filled
    kept = [line for line in filled.splitlines() if line in ("before", "between", "after")]
    assert kept == ["before", "between", "after"]


def test_a_document_without_parts_or_with_an_open_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"some.md has no line like"):
        document.names_in("nothing here\n", FILE)
    with pytest.raises(ConfigError, match=r"one part for table1, closed by"):
        document.names_in(TEXT.replace("<!-- end of table1 -->", ""), FILE)
    with pytest.raises(ConfigError, match=r"one part for table1"):
        document.names_in(TEXT + TEXT, FILE)


def test_the_record_is_what_the_committed_runs_say() -> None:
    """`semisfl reproduce all --no-run --into docs/results.md` has been called since runs were added."""
    file = ROOT / "docs" / "results.md"
    text = file.read_text(encoding="utf-8")
    records = Records(ROOT / "nowhere", [ROOT / "results"])

    def make(name: str) -> str:
        exhibit = EXHIBITS[name]
        parts = [(part, written.measured(part, records)) for part in exhibit.parts]
        assert (file.parent / "paper" / f"{name}.png").is_file()
        return written.exhibit(exhibit, parts, file.parent, f"paper/{name}.png", alone=False)

    names = document.names_in(text, file)
    assert {f"table{number}" for number in range(1, 6)} <= set(names)
    assert document.filled(text, make, names) == text
