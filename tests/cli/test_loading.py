"""What commands load: a person who asks a question does not wait for what trains or draws."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "results"
RUN = min(RESULTS.rglob("*.run.json"))
CODE = """
import sys
from semisfl.cli.main import main
from semisfl.runs import plots

def draw(groups, path, panels):
    sys.stdout.flush()
    print("drawing; loaded", "matplotlib" in sys.modules)

plots.draw = draw
code = main(sys.argv[1:])
print(sorted(sys.modules), file=sys.stderr)
sys.exit(code)
"""
HEAVY = {"torch", "matplotlib", "numpy", "grpc", "cryptography", "datasets", "triton"}


def loaded(*words: str) -> tuple[str, set[str]]:
    """What a command prints, and the heavy packages it has loaded by its end."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    modules = set(done.stderr.strip().splitlines()[-1][2:-2].split("', '"))
    assert "semisfl.cli.main" in modules
    return done.stdout, HEAVY & modules


@pytest.mark.parametrize(
    "words",
    [
        ["show", "digits"],
        ["list"],
        ["reproduce", "--list"],
        ["--help"],
        ["run", "--help"],
        ["--version"],
    ],
    ids=str,
)
def test_answers_without_anything_heavy(words: list[str]) -> None:
    printed, heavy = loaded(*words)
    assert printed and not heavy


def test_a_report_needs_no_torch_and_its_table_comes_before_the_picture(tmp_path: Path) -> None:
    printed, heavy = loaded("report", str(RUN), "--out", str(tmp_path / "x.png"))
    assert not heavy
    table, picture = printed.index("accuracy %"), printed.index("drawing; loaded False")
    assert table < picture < printed.index("curves: ")


def test_a_page_needs_no_torch(tmp_path: Path) -> None:
    printed, heavy = loaded("report", str(RUN), "--html", str(tmp_path / "x.html"))
    assert printed.startswith("page: ") and not heavy


def test_a_report_for_a_machine_needs_no_torch(tmp_path: Path) -> None:
    printed, heavy = loaded("report", str(RUN), "--json", "--out", str(tmp_path / "x.png"))
    assert not heavy
    assert json.loads(printed.splitlines()[-1])["results"]


def test_a_run_starts_without_the_compiler_of_torch(tmp_path: Path) -> None:
    """Importing it takes as long as torch itself does."""
    short = ["rounds=1", "clients.steps=1", "server.steps=1", "clients.active=1"]
    words = ["run", "digits", "--quiet", "--out", str(tmp_path / "run"), "--set", *short]
    done = subprocess.run(
        [sys.executable, "-c", CODE, *words], capture_output=True, text=True, check=True
    )
    modules = done.stderr.strip().splitlines()[-1]
    assert "'torch._C'" in modules
    assert "'torch._dynamo'" not in modules and "'torch._inductor'" not in modules


def test_the_check_would_see_torch() -> None:
    assert "torch" in loaded("plan", "digits", "--methods", "all")[1]
