"""Deliberately wrong changes of the package, and the tests that must notice each of them.

A change is one row of a TOML file beside this one:

    [[wrong]]
    why = "what goes wrong, in words; no two alike"
    file = "algorithm/losses.py"                 # in the package
    old = "text that occurs exactly once in it"
    new = "what stands there instead"
    tests = ["algorithm/test_losses.py::test_x"]  # under tests/: files, or single tests
    equivalent = "why no test can notice it"      # only for a change of text that changes nothing
"""

import hashlib
import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Wrong:
    why: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    area: str
    equivalent: str = ""

    def applied(self, text: str) -> str:
        """The file's ``text`` with the change."""
        if (count := text.count(self.old)) != 1:
            raise ValueError(
                f"{self.area}.toml: {self.old!r} occurs {count} times in {self.file}, must once: "
                f"adapt the entry {self.why!r}"
            )
        return text.replace(self.old, self.new)

    def write(self, root: Path) -> None:
        """Apply it in a copy of the repository."""
        right = self.source(ROOT).read_text(encoding="utf-8")
        self.source(root).write_text(self.applied(right), encoding="utf-8")

    def undo(self, root: Path) -> None:
        self.source(root).write_bytes(self.source(ROOT).read_bytes())

    def source(self, root: Path) -> Path:
        return root / "semisfl" / self.file

    def test_files(self, root: Path) -> list[Path]:
        return sorted({root / "tests" / test.partition("::")[0] for test in self.tests})

    def digest(self) -> str:
        """Of the entry, the file it changes and the tests that concern it, as they are now."""
        parts = [repr(self).encode()]
        parts += [path.read_bytes() for path in (self.source(ROOT), *self.test_files(ROOT))]
        return hashlib.sha256(b"\0".join(parts)).hexdigest()


def read() -> list[Wrong]:
    """The whole catalogue."""
    entries = []
    for path in sorted(HERE.glob("*.toml")):
        rows = tomllib.loads(path.read_text(encoding="utf-8"))["wrong"]
        entries += [Wrong(**{**row, "tests": tuple(row["tests"])}, area=path.stem) for row in rows]
    return entries
