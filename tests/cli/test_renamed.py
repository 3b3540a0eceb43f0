"""Old names of commands and options work, and one line on stderr names the new ones."""

import json
from pathlib import Path

import pytest

from semisfl.cli.main import app, main
from semisfl.cli.renamed import COMMANDS, today


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("cost runs --json", "replay runs --json"),
        ("spoilers digits --shares 0", "poisoning digits --shares 0"),
        ("bench --client --preset svhn", "bench --client svhn"),
        ("bench --preset=svhn", "bench svhn"),
        ("certs server --name a --name b", "certs server --host a --host b"),
        ("certs client --name a", "certs client --name a"),
        ("leakage digits --effort quick", "leakage digits --quick"),
        ("leakage --effort full digits", "leakage digits"),
        ("leakage --effort some digits", "leakage --effort some digits"),
        ("join x --name cost", "join x --name cost"),
        (
            "costs svhn --up 2",
            "plan svhn --uplink 2 --methods all --profile wire-only --latency 0 --downlink 15",
        ),
    ],
)
def test_old_names_are_replaced_by_new_ones(old: str, new: str) -> None:
    assert " ".join(today(old.split())) == new
    assert today(new.split()) == new.split(), "nothing is translated twice"


def test_old_commands_are_not_shown() -> None:
    known = {command.name for command in app.registered_commands}
    assert not known & COMMANDS.keys()
    assert set(COMMANDS.values()) <= known


def test_an_old_command_still_works_and_names_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["costs", "digits", "--up", "2", "--down=10", "--json"]) == 0
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith("warning: this is now written `semisfl plan digits --uplink 2")
    semisfl = json.loads(printed.out)["methods"][0]
    assert semisfl["seconds"] == pytest.approx(8 * semisfl["down"] / 10e6 + 8 * semisfl["up"] / 2e6)
    assert not list(tmp_path.iterdir()), "methods alone need no picture"


def test_names_of_today_print_no_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "digits", "--methods", "semifl,semisfl"]) == 0
    printed = capsys.readouterr()
    assert not printed.err
    assert printed.out.index("SemiFL") < printed.out.index("SemiSFL")
    assert "Supervised-only" not in printed.out and "Best cut" not in printed.out
