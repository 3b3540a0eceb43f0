"""What docs/security.md shows is what the committed runs say."""

from benchmarks import security_tables as tables
from semisfl.paper.document import filled


def test_the_document_holds_the_tables_of_the_committed_runs() -> None:
    text = tables.DOCUMENT.read_text(encoding="utf-8")
    made = filled(text, lambda name: tables.TABLES[name](), list(tables.TABLES), "security")
    assert made == text, "make results writes the tables again"
    assert text.count("<!-- security ") == len(tables.TABLES)


def test_the_goals_that_the_document_claims_are_met() -> None:
    noisy = [run["features"][-1]["decoder"]["ssim"] for run in tables.by_seed("noise0.14")]
    assert tables.mean(noisy) <= 0.44 and tables.mean(tables.lost("noise0.14")) <= 2
    found = tables.points_lost()
    for attack in tables.ATTACKS:
        assert tables.mean(found[attack, 0.2][tables.RECOMMENDED]) <= 3
    assert tables.mean(found[tables.NOBODY, 0.0][tables.RECOMMENDED]) <= 0.5
