"""A file is one idea, and a constructor takes few collaborators."""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "semisfl"
PLAIN = {"int", "float", "str", "bool", "Path"}
"""A parameter of these types is a setting, not a collaborator."""


def constructors() -> Iterator[tuple[str, list[ast.arg]]]:
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef):
                continue
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    arguments = method.args
                    yield (
                        f"{path.relative_to(SOURCE)}: {node.name}",
                        [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs][1:],
                    )


def is_plain(parameter: ast.arg) -> bool:
    names = {node.id for node in ast.walk(parameter) if isinstance(node, ast.Name)}
    return names <= PLAIN


def test_a_constructor_takes_at_most_five_collaborators() -> None:
    collaborators = {
        name: [one.arg for one in parameters if not is_plain(one)]
        for name, parameters in constructors()
    }
    assert len(collaborators) > 100
    assert not {name: taken for name, taken in collaborators.items() if len(taken) > 5}


def test_no_file_is_longer_than_three_hundred_lines() -> None:
    lengths = {
        str(path.relative_to(SOURCE)): len(path.read_text(encoding="utf-8").splitlines())
        for path in SOURCE.rglob("*.py")
    }
    assert not {name: length for name, length in lengths.items() if length > 300}
