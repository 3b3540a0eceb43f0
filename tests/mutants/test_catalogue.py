"""The catalogue of wrong changes still fits the package and its tests; `make mutants` runs them."""

import ast
from collections import Counter

import pytest

from tests.mutants.catalogue import ROOT, Wrong, read

ENTRIES = read()


@pytest.mark.parametrize("wrong", ENTRIES, ids=lambda wrong: wrong.why)
def test_entry_applies_and_its_tests_exist(wrong: Wrong) -> None:
    right = wrong.source(ROOT).read_text(encoding="utf-8")
    changed = wrong.applied(right)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(right)), "it changes nothing"
    assert wrong.tests
    for test in wrong.tests:
        file, _, function = test.partition("::")
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert not function or function.partition("[")[0] in names, f"{file} has no {function}"


def test_the_catalogue_is_large_and_covers_what_computes_and_what_checks() -> None:
    assert len(ENTRIES) >= 80
    assert max(Counter(wrong.why for wrong in ENTRIES).values()) == 1
    rooms = {wrong.file.partition("/")[0] for wrong in ENTRIES}
    assert rooms >= {"algorithm", "methods", "costs", "data", "engine", "fleet", "net"}
