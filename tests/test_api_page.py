"""docs/api.md: every public name has an example, and the examples run."""

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import semisfl

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)


class FakeMLflow(types.ModuleType):
    """The functions of MLflow that the page uses."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.calls: list[Any] = []

    def start_run(self, run_name: str | None = None) -> None:
        self.calls.append(("start", run_name))

    def log_params(self, params: dict[str, Any]) -> None:
        self.calls.append(("params", params))

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        assert all(isinstance(value, int | float) for value in metrics.values())
        self.calls.append((step, metrics))

    def end_run(self) -> None:
        self.calls.append("end")


class FakeWandB(types.ModuleType):
    """The functions of Weights & Biases that the page uses; a run is the module itself."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[Any] = []

    def init(self, project: str, name: str | None, config: dict[str, Any]) -> "FakeWandB":
        self.calls.append(("start", project, name, config["method"]))
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.calls.append((step, values))

    def finish(self) -> None:
        self.calls.append("end")


@pytest.fixture
def trackers(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeMLflow, FakeWandB]:
    fakes = FakeMLflow(), FakeWandB()
    for fake in fakes:
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
    return fakes


def test_every_public_name_is_imported_by_an_example() -> None:
    lines = re.findall(r"^from semisfl import (.+)$", "\n".join(BLOCKS), re.M)
    assert {name for line in lines for name in line.split(", ")} == set(semisfl.__all__)


def test_the_examples_run_one_after_the_other(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    trackers: tuple[FakeMLflow, FakeWandB],
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for number, block in enumerate(BLOCKS):
        exec(compile(block, f"api.md, example {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert "clients.active = 9 exceeds clients.total = 4" in printed
    assert "['conv', 'relu', 'residual', 'pool', 'flatten', 'linear']" in printed
    assert "round 2: " in printed and "latest.safetensors is " in printed
    assert "\nTrue 2 4\n" in printed
    assert len(names["result"].history["loss_semi"]) == 4
    for fake in trackers:
        steps = [call[0] for call in fake.calls if isinstance(call[0], int)]
        assert fake.calls[0][0] == "start" and steps == [0, 1, 2, 3] and fake.calls[-1] == "end"
        last = next(call[1] for call in fake.calls if call[0] == 3)
        assert {"accuracy", "loss_semi", "bytes_total"} <= {*last}
