"""Other packages, as if installed: importable, with the metadata that an installer would write."""

import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "fedavg_fixmatch"
NAME, PLACE = "fedavg-fixmatch", "fedavg_fixmatch.method:FedAvgFixMatch"


def entry_points_of(project: Path) -> dict[str, dict[str, str]]:
    text = (project / "pyproject.toml").read_text(encoding="utf-8")
    return dict(tomllib.loads(text)["project"]["entry-points"])


def install_package(
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    groups: Mapping[str, Mapping[str, str]],
) -> None:
    """Make the modules in ``folder`` importable, with entry points by group and name."""
    metadata = site / f"{folder.name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Name: {folder.name}\nVersion: 1.0\n")
    lines = [
        line
        for group, points in groups.items()
        for line in (f"[{group}]", *(f"{name} = {place}" for name, place in points.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.syspath_prepend(str(folder))


@contextmanager
def imported_anew(*packages: str) -> Iterator[None]:
    """Forget afterwards what was imported of ``packages`` meanwhile."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] in packages:
            del sys.modules[name]
