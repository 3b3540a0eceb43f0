"""Packages beside this one: importable, and forgotten afterwards."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "fedavg_fixmatch"
PLACE = "fedavg_fixmatch.method:FedAvgFixMatch"
SOFT = "mypackage.soft:SoftWeights"


@contextmanager
def imported_anew(*packages: str) -> Iterator[None]:
    """Forget afterwards what was imported of ``packages`` meanwhile."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] in packages:
            del sys.modules[name]


def written_in_the_documentation(folder: Path, name: str) -> None:
    """Make the package ``mypackage`` in ``folder`` with a module of docs/own-method.md."""
    page = (ROOT / "docs" / "own-method.md").read_text(encoding="utf-8")
    block = page[page.index(f"# mypackage/{name}.py") :].partition("```")[0]
    (folder / "mypackage").mkdir()
    (folder / "mypackage" / "__init__.py").write_text("")
    (folder / "mypackage" / f"{name}.py").write_text(block)
