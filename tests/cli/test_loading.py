"""Test that commands import only what they need: `--help` does not wait for torch or matplotlib."""

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.cli.test_signals import images as images
from tests.reproduction.fakes import digits_cell, leave_run

CODE = """
import sys
from semisfl.cli.main import main
from semisfl.runs import plots

def draw(groups, path, panels):
    sys.stdout.flush()
    print("drawing; loaded", "matplotlib" in sys.modules)

plots.draw = draw
for words in " ".join(sys.argv[1:]).split(" and "):
    print("$", words, flush=True)
    assert main(words.split()) == 0
    print(sorted(sys.modules), file=sys.stderr)
"""
HEAVY = {"torch", "matplotlib", "numpy", "grpc", "cryptography", "datasets", "triton"}


def loaded(*commands: str) -> tuple[list[str], set[str]]:
    """Return what each of the commands prints, run one after the other in one process, and all
    modules that are loaded by the end."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, " and ".join(commands)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    modules = set(done.stderr.strip().splitlines()[-1][2:-2].split("', '"))
    assert "semisfl.cli.main" in modules
    printed = re.split(r"^\$ .*\n", done.stdout, flags=re.MULTILINE)[1:]
    assert len(printed) == len(commands) and all(printed)
    return printed, modules


def test_quick_commands_do_not_import_torch() -> None:
    commands = ("show digits", "list", "--help", "run --help", "--version")
    assert not HEAVY & loaded(*commands)[1]


def test_a_report_needs_no_torch_and_its_table_comes_before_the_picture(tmp_path: Path) -> None:
    run = leave_run(tmp_path / "run", digits_cell().config(), [10.0, 20.0])
    (report, page, output), modules = loaded(
        f"report {run} --out {tmp_path}/x.png",
        f"report {run} --html {tmp_path}/x.html",
        f"report {run} --json --out {tmp_path}/x.png",
    )
    assert not HEAVY & modules
    table, picture = report.index("accuracy %"), report.index("drawing; loaded False")
    assert table < picture < report.index("curves: ")
    assert page.startswith("page: ")
    assert json.loads(output.splitlines()[-1])["results"]


def test_a_run_starts_without_the_compiler_of_torch(images: Path) -> None:
    """Importing it takes as long as torch itself does. This also shows that the tests above would
    see torch."""
    short = (
        "rounds=1 clients.steps=1 server.steps=1 clients.total=2 clients.active=1 data.labeled=8"
    )
    _, modules = loaded(f"run --quiet --json --out run --set data.name={images} {short}")
    assert {"torch", "torch._C"} <= modules
    assert not {"torch._dynamo", "torch._inductor"} & modules
