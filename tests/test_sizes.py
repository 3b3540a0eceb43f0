"""The rooms of the package keep their budgets of statements.

``python -m tests.test_sizes`` prints the table.
"""

import ast
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "semisfl"

# A ratchet: a commit may lower these numbers; only a new feature with a budget of its own may raise one.
BUDGETS = {
    "algorithm": 302,
    "attacks": 544,
    "cli": 1382,
    "costs": 750,
    "data": 1450,
    "engine": 729,
    "engine/kernels": 1094,
    "fleet": 1560,
    "fleet/cluster": 442,
    "methods": 1270,
    "metrics": 125,
    "models": 1272,
    "net": 407,
    "net/client": 1004,
    "net/server": 1513,
    "net/tls": 426,
    "root": 138,
    "runs": 2121,
    "settings": 970,
    "use": 913,
    "watch": 665,
}
NESTED = ("engine", "fleet", "net")
"""The folders whose own folders are rooms too."""


def is_docstring(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def statements(text: str) -> int:
    """Return the number of statements of a file. Docstrings do not count: explanation is free."""
    nodes = ast.walk(ast.parse(text))
    return sum(isinstance(node, ast.stmt) and not is_docstring(node) for node in nodes)


def room_of(path: Path) -> str:
    folders = path.relative_to(SOURCE).parts[:-1]
    if not folders:
        return "root"
    return "/".join(folders[:2]) if folders[0] in NESTED else folders[0]


def sizes() -> Counter[str]:
    """Return the statements of each room."""
    counts: Counter[str] = Counter()
    for path in SOURCE.rglob("*.py"):
        counts[room_of(path)] += statements(path.read_text(encoding="utf-8"))
    return counts


def test_every_room_keeps_its_budget() -> None:
    now = sizes()
    assert set(now) <= set(BUDGETS), "a new room needs a budget"
    assert not {room: n for room, n in now.items() if n > BUDGETS[room]}


def test_docstrings_are_free() -> None:
    assert statements('"""A module."""\n\ndef f():\n    """Return 1."""\n    return 1\n') == 2


if __name__ == "__main__":
    now = sizes()
    for room, budget in BUDGETS.items():
        print(f"{room:16}{now[room]:7}  of {budget}")
    print(f"{'all':16}{now.total():7}")
