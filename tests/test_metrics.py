"""Round metrics: how a file holds them, and that docs/watching.md is right about every key."""

import json
import re
from pathlib import Path

import pytest

from semisfl.metrics import KEYS, RoundMetrics
from semisfl.runs.loop import run_rounds
from semisfl.settings.catalog import METHODS
from tests import toy

PAGE = (Path(__file__).parent.parent / "docs" / "watching.md").read_text(encoding="utf-8")
ROUNDS = PAGE.partition("## The metrics of a round")[2].partition("### Devices")[0]
LINES = re.findall(r"^\| `(\S+)` \|(.*)\|$", ROUNDS, re.MULTILINE)
CELLS = {key: [cell.strip() for cell in rest.split("|")] for key, rest in LINES}


def test_absent_metrics_are_not_written_and_are_read_as_none() -> None:
    row = RoundMetrics(
        round=3,
        learning_rate=0.02,
        coverage_by_class=[0.5, None],
        accuracy=70.0,
        accuracies={"teacher": 70.0, "student": 60.0},
        bytes={},
        bytes_total=0,
    )
    written = row.as_dict()
    assert written == {
        "round": 3,
        "learning_rate": 0.02,
        "coverage_by_class": [0.5, None],
        "accuracy": 70.0,
        "accuracy_teacher": 70.0,
        "accuracy_student": 60.0,
        "bytes": {},
        "bytes_total": 0,
    }
    assert RoundMetrics.from_dict(json.loads(json.dumps(written))) == row


def test_a_mark_is_no_number() -> None:
    assert RoundMetrics(round=1, diverged=True, accuracy=10.0).numbers() == {"accuracy": 10.0}


def test_a_file_may_be_older_or_newer() -> None:
    newer = RoundMetrics.from_dict({"round": 1, "of_tomorrow": 2, "nested": {}, "text": "a"})
    assert newer == RoundMetrics(round=1, own={"of_tomorrow": 2})
    assert newer.as_dict() == {"round": 1, "of_tomorrow": 2}
    for damaged in ({"accuracy": 1.0}, [1], {"round": "one"}):
        with pytest.raises(ValueError, match="no round"):
            RoundMetrics.from_dict(damaged)


# --- docs/watching.md ---------------------------------------------------------------------------------


def test_every_key_is_defined_once_and_nothing_else() -> None:
    keys = [key for key, _ in LINES]
    assert sorted(keys) == sorted({"round", "accuracy_<model>", *KEYS})
    assert all(len(cells) == 5 and cells[0] and cells[2] and cells[3] for cells in CELLS.values())


def documented(method: str) -> set[str]:
    """Return the keys that the page gives to a method."""
    title = METHODS[method].title
    named = {
        key: [name.strip() for name in cells[3].removeprefix("all but ").split(",")]
        for key, cells in CELLS.items()
    }
    return {
        key
        for key, cells in CELLS.items()
        if cells[3] == "all" or (title in named[key]) != cells[3].startswith("all but ")
    }


def keys_of(row: dict[str, object]) -> set[str]:
    return {re.sub("accuracy_.*", "accuracy_<model>", key) for key in row}


@pytest.mark.parametrize("method", [name for name in METHODS if name != "probe"])
def test_a_methods_rows_have_the_keys_that_the_page_says(method: str) -> None:
    """The first round has neither clients nor a test, the second has both, with known labels."""
    section = {"fedswitch-sl": "fedswitch", "supervised": "semisfl"}.get(method, method)
    settings = [f"{section}.confidence_threshold=0", "rounds=2", "runtime.evaluate_every=2"]
    settings.append("stop.target=0.01")
    experiment = toy.assemble(method, *settings, "server.pretrain_rounds=1")
    experiment.validation = (experiment.test_images[:40], experiment.test_labels[:40])
    bare, full = run_rounds(experiment).rounds
    never = {"held_back", "bytes_repeated", "warnings", "diverged"}
    assert keys_of(full) == documented(method) - never, (
        "honest clients that stay, in a run that works"
    )
    always = {key for key, cells in CELLS.items() if cells[2].startswith("always there")}
    assert keys_of(bare) == documented(method) & always


def test_seconds_are_of_the_whole_round_and_its_parts() -> None:
    (row,) = run_rounds(toy.assemble("supervised", "rounds=1")).rounds
    assert row["seconds_training"] > 0 and row["seconds_testing"] > 0
    assert row["seconds_training"] + row["seconds_testing"] <= row["seconds"]
