"""docs/api.md: every public name has an example, and the examples run."""

import ast
import importlib
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import semisfl

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)


class Fake(types.ModuleType):
    """A tracker that notes every call, whatever its name; a run is the module itself."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__file__ = f"{name}.py"  # torch asks every module for it
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def noted(*values: Any, **named: Any) -> "Fake":
            self.calls.append((name, {**dict(enumerate(values)), **named}))  # type: ignore[dict-item]
            return self

        return noted


@pytest.fixture
def trackers(monkeypatch: pytest.MonkeyPatch) -> list[Fake]:
    fakes = [Fake("mlflow"), Fake("wandb")]
    for fake in fakes:
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
    return fakes


def test_every_public_name_is_imported_by_an_example() -> None:
    lines = re.findall(r"^from semisfl import (.+)$", "\n".join(BLOCKS), re.M)
    assert {name for line in lines for name in line.split(", ")} == set(semisfl.__all__)


def test_what_the_examples_of_a_method_import_is_promised() -> None:
    promised = set()
    for module, names in re.findall(r"^\| (`semisfl\.[^|]+) \| ([^|]+) \|$", TEXT, re.M):
        promised |= {(module.strip("`"), name) for name in re.findall(r"`(\w+)`", names)}
    for module, name in promised:
        assert hasattr(importlib.import_module(module), name), f"{module} has no {name}"
    page = (PAGE.parent / "own-method.md").read_text(encoding="utf-8")
    used = set()
    for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("semisfl."):
                used |= {(str(node.module), alias.name) for alias in node.names}
    assert used <= promised


def test_the_examples_run_one_after_the_other(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    trackers: list[Fake],
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for number, block in enumerate(BLOCKS):
        exec(compile(block, f"api.md, example {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert "clients.active = 9 exceeds clients.total = 4" in printed
    assert "['conv', 'relu', 'residual', 'pool', 'flatten', 'linear']" in printed
    assert "round 1: " in printed and "latest.safetensors is " in printed
    assert "\nTrue 2 4\n" in printed
    assert len(names["result"].history["loss_semi"]) == 4
    for fake, ends in zip(trackers, (("start_run", "end_run"), ("init", "finish")), strict=True):
        assert (fake.calls[0][0], fake.calls[-1][0]) == ends
        logged = [call for _, call in fake.calls if "step" in call]
        assert [call["step"] for call in logged] == [0, 1, 2, 3]
        assert {"accuracy", "loss_semi", "bytes_total"} <= {*logged[-1][0]}  # type: ignore[index]
