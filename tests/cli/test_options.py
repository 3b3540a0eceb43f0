"""`--set` in a row and repeated, as a person writes it."""

import json
from typing import Any

import pytest

from semisfl.cli.main import main
from semisfl.cli.options import spread_settings


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (["--set", "a=1", "b=2"], ["--set", "a=1", "--set", "b=2"]),
        (["--set", "a=1", "--set", "b=2"], ["--set", "a=1", "--set", "b=2"]),
        (["--set=a=1", "b=2"], ["--set=a=1", "--set", "b=2"]),
        (["--set", "a.b=x y=z", "c=d e"], ["--set", "a.b=x y=z", "--set", "c=d e"]),
        (["--set", "a=1", "b = 2"], ["--set", "a=1", "--set", "b = 2"]),
        (["--set", "a=1", "digits", "b=2"], ["--set", "a=1", "digits", "b=2"]),
        (["--set", "a=1", "--json", "b=2"], ["--set", "a=1", "--json", "b=2"]),
        (["--set", "a=1", "./b=2.toml"], ["--set", "a=1", "./b=2.toml"]),
        (["--set", "a=1", "--", "b=2"], ["--set", "a=1", "--", "b=2"]),
        (["--", "--set", "a=1", "b=2"], ["--", "--set", "a=1", "b=2"]),
        (["--set", "--set", "b=2"], ["--set", "--set", "--set", "b=2"]),
        (["--out", "x", "a=1", "--set"], ["--out", "x", "a=1", "--set"]),
        (["--settle", "a=1", "b=2"], ["--settle", "a=1", "b=2"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_several_settings_can_follow_one_option(written: list[str], read: list[str]) -> None:
    assert spread_settings(written) == read
    assert spread_settings(read) == read, "a second time changes nothing"


def settings_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["show", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "words",
    [
        ["--set", "rounds=7", "data.name=my folder/a=b", "cifar10"],
        ["cifar10", "--set", "rounds=7", "--set", "data.name=my folder/a=b"],
        ["--set=rounds=7", "--set=data.name=my folder/a=b", "cifar10"],
        ["--set=rounds=7", "data.name=my folder/a=b", "--", "cifar10"],
        ["cifar10", "--set", "rounds=1", "data.name=my folder/a=b", "--set", "rounds=7"],
    ],
    ids=" ".join,
)
def test_settings_can_be_written_in_several_ways(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    values = settings_of(capsys, *words)
    plain = settings_of(capsys, "cifar10")
    assert values == plain | {"rounds": 7, "data": plain["data"] | {"name": "my folder/a=b"}}


@pytest.mark.parametrize("words", [["--set"], ["--set", "rounds"], ["--set", "digits", "rounds=3"]])
def test_other_words_are_not_taken_as_settings(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", *words]) == 2
    printed = capsys.readouterr()
    assert "--set" in printed.err and printed.err.count("\n") == 1 and not printed.out
