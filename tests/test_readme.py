"""Test that the README's instructions work, and that the commands of every page exist."""

import io
import json
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest

from semisfl.cli.main import app, main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
USAGE = "\n".join(
    (ROOT / "docs" / page).read_text(encoding="utf-8")
    for page in ("usage.md", "watching.md", "deploy.md")
)
PAGES = "\n".join(
    [README, *(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/*.md")))]
)


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def commands(text: str) -> list[list[str]]:
    """Return the words of every `semisfl` command in a shell's block, as far as the next pipe or file."""
    shown = "\n".join(blocks("sh", text) + blocks("console", text)).replace("\\\n", " ")
    lines = [re.sub(r"^[$#] ", "", line.strip()) for line in shown.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines if line.startswith("semisfl ")]
    return [list(takewhile(lambda word: word not in (">", "|", "&&"), one[1:])) for one in words]


def test_the_library_example_trains(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = blocks("python")
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    accuracy = float(re.match(r"([\d.]+) %", capsys.readouterr().out).group(1))  # type: ignore[union-attr]
    assert accuracy > 80, "the square is easy to see"


@pytest.mark.slow  # five processes start; the tutorial's test has a network with devices
def test_the_example_of_a_network_trains_with_four_devices(tmp_path: Path) -> None:
    assert "python examples/demo_network.py" in "\n".join(blocks("sh"))
    few = ["rounds=1", "clients.steps=1", "server.steps=1"]
    words = [sys.executable, str(ROOT / "examples" / "demo_network.py"), str(tmp_path), *few]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stderr
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(metrics) == 1 and json.loads(metrics[0])["contributing"] == 4
    assert done.stderr.count("the run is finished; 1 round with") == 4


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = re.findall(r"^make ([\w-]+)", "\n".join(blocks("sh")), flags=re.MULTILINE)
    assert {"demo", "test"} <= set(named)
    for target in named:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_every_command_is_documented() -> None:
    known = {command.name for command in (*app.registered_commands, *app.registered_groups)}
    documented = {words[0] for words in commands(USAGE)}
    assert known <= documented, (
        f"docs/usage.md, watching.md and deploy.md do not show {known - documented}"
    )


@cache
def help_of(*command: str) -> str:
    with redirect_stdout(io.StringIO()) as output:
        assert main([*command, "--help"]) == 0
    return output.getvalue()


@pytest.mark.parametrize("words", commands(PAGES), ids=" ".join)
def test_commands_parse(words: list[str]) -> None:
    """Every option shown exists: with --help at its end a command only parses."""
    options = {word for word in words if word.startswith("--")}
    groups = {group.name for group in app.registered_groups}
    command = words[:2] if words[0] in groups else words[:1]
    for option in options:
        assert option in help_of(*command) or option in ("--debug", "--version", "--log-format"), (
            option
        )
