"""The oldest versions that are promised are those that `make test-oldest` installs."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def versions(lines: str, relation: str) -> dict[str, list[int]]:
    """Return versions by package; ``2.7`` and ``2.7.0`` are equal."""
    return {
        name.lower().replace("_", "-"): [*map(int, re.sub(r"(\.0)+$", "", version).split("."))]
        for name, version in re.findall(rf"^([\w-]+){relation}([\d.]+)$", lines, re.M)
    }


def test_every_lower_bound_is_the_version_of_the_oldest_environment() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = project["dependencies"]
    for extra, packages in project["optional-dependencies"].items():
        bounds += packages if extra != "check" else []  # linters are not for the oldest versions
    promised = versions("\n".join(bounds), ">=")
    installed = versions((ROOT / "constraints-oldest.txt").read_text(encoding="utf-8"), "==")
    assert promised["torch"] and promised["onnxscript"] and len(promised) > 20
    assert {name: installed.get(name) for name in promised} == promised
