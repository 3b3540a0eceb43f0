"""`--set` in a row and repeated, as a person writes it."""

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


@pytest.mark.parametrize("words", [["--set"], ["--set", "rounds"], ["--set", "digits", "rounds=3"]])
def test_other_words_are_not_taken_as_settings(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", *words]) == 2
    printed = capsys.readouterr()
    assert "--set" in printed.err and printed.err.count("\n") == 1 and not printed.out
