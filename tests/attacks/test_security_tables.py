"""The tables of docs/leakage.md and docs/poisoning.md match the committed runs."""

from benchmarks import security_tables as tables


def test_the_documents_hold_the_tables_of_the_committed_runs() -> None:
    held: list[str] = []
    for document in tables.DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        assert tables.with_tables(text) == text, "make results writes the tables again"
        held += tables.names_in(text)
    assert sorted(held) == sorted(tables.TABLES), "each table is in one document, once"


def test_the_goals_that_the_documents_claim_are_met() -> None:
    noisy = [run["features"][-1]["decoder"]["ssim"] for run in tables.by_seed("noise0.14")]
    assert tables.mean(noisy) <= 0.44 and tables.mean(tables.lost("noise0.14")) <= 2
    for clients in tables.FLEETS:
        for attack, by_rule in tables.points_lost(clients).items():
            assert tables.mean(by_rule[tables.SERVED]) <= 1, (attack, clients)
