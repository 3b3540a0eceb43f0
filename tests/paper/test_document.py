"""Documents whose tables are made from runs. Our own pages must match the committed runs."""

from pathlib import Path

import pytest

from benchmarks import result_tables
from semisfl.paper import document, written
from semisfl.paper.exhibits import EXHIBITS
from semisfl.paper.run_index import RunIndex
from semisfl.runs import reading
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


def test_parts_are_filled_and_the_rest_stays() -> None:
    names = document.names_in(TEXT, FILE)
    assert names == ["table1", "fig8"]
    filled = document.filled(TEXT, lambda name: f"new {name} \\* \\g<1>\n", names)
    assert "new table1 \\* \\g<1>\n" in filled and "old" not in filled
    assert document.filled(filled, lambda name: f"new {name} \\* \\g<1>", names) == filled
    kept = [line for line in filled.splitlines() if line in ("before", "between", "after")]
    assert kept == ["before", "between", "after"]


def test_a_document_without_parts_or_with_an_unclosed_part_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"some.md has no line like"):
        document.names_in("nothing here\n", FILE)
    with pytest.raises(ConfigError, match=r"one part for table1, closed by"):
        document.names_in(TEXT.replace("<!-- end of table1 -->", ""), FILE)
    with pytest.raises(ConfigError, match=r"one part for table1"):
        document.names_in(TEXT + TEXT, FILE)


PAGES = ("results", "results-more", "paper-choices", "paper-costs", "paper-figures")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_matches_the_committed_runs(page: str, index: RunIndex) -> None:
    """Fails if `make results` was not called after a run changed."""
    file = ROOT / "docs" / f"{page}.md"
    text = file.read_text(encoding="utf-8")

    def make(name: str) -> str:
        exhibit = EXHIBITS[name]
        parts = [(part, written.measured(part, index)) for part in exhibit.parts]
        assert (file.parent / "paper" / f"{name}.png").is_file()
        return written.exhibit(exhibit, parts, file.parent, f"paper/{name}.png", alone=False)

    assert document.filled(text, make, document.names_in(text, file)) == text


def test_every_table_of_the_paper_is_on_one_page_and_make_results_writes_all_pages() -> None:
    text = {page: (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in PAGES}
    names = [name for page in PAGES for name in document.names_in(text[page], Path(page))]
    assert len(set(names)) == len(names)
    assert {f"table{number}" for number in range(1, 6)} <= set(names)
    assert f"PAGES := {' '.join(PAGES)}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_tables_of_our_own_match_the_committed_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    made = result_tables.pages()
    for page, text in made.items():
        assert page.read_text(encoding="utf-8") == text, f"{page}: call `make results`"
    marks = [f"<!-- end of {name} -->" for name in result_tables.TABLES]
    assert all(sum(mark in text for text in made.values()) == 1 for mark in marks)


def test_there_are_few_result_files_and_every_run_has_an_environment() -> None:
    files = [file for file in (ROOT / "results").rglob("*") if file.is_file()]
    assert len(files) <= 450
    assert sum(file.stat().st_size for file in files) <= 14e6
    runs = [file for file in files if file.name.endswith(reading.SUFFIX)]
    assert len(runs) > 300 and all(reading.read_environment(file) for file in runs)
    directories = {file.parent for file in files if file.name == "config.toml"}
    assert directories == {ROOT / "results" / "watch" / "served"}
