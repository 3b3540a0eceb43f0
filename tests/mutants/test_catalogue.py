"""The catalogue of wrong changes still fits the package and its tests; `make mutants` runs them."""

import ast
from collections import Counter
from functools import cache

from tests.mutants.catalogue import ROOT, Wrong, read


@cache
def dump(text: str) -> str:
    return ast.dump(ast.parse(text))


@cache
def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def faults(wrong: Wrong) -> list[str]:
    """Return why the entry does not fit; empty if it does."""
    right = wrong.source(ROOT).read_text(encoding="utf-8")
    try:
        changed = dump(wrong.applied(right))
    except (ValueError, SyntaxError) as error:
        return [str(error)]
    reasons = [] if changed != dump(right) else ["it changes nothing"]
    reasons += [] if wrong.tests else ["it names no test"]
    for test in wrong.tests:
        file, _, function = test.partition("::")
        if function and function.partition("[")[0] not in functions(file):
            reasons.append(f"{file} has no {function}")
    return reasons


def test_every_entry_applies_and_its_tests_exist() -> None:
    unfit = {wrong.why: reasons for wrong in read() if (reasons := faults(wrong))}
    assert not unfit


def test_the_catalogue_is_large_and_covers_what_computes() -> None:
    entries = read()
    assert len(entries) >= 80
    assert max(Counter(wrong.why for wrong in entries).values()) == 1
    rooms = {wrong.file.partition("/")[0] for wrong in entries}
    assert rooms == {"algorithm", "methods", "engine", "fleet"}
