"""Test which runs are alike, and the labels of groups: they name the settings that differ and matter."""

from typing import Any

from semisfl.runs.report import alike_but_for_seed, label_of
from semisfl.settings.presets import merge

SEMISFL = {"method": "semisfl"}


def labels(*configs: dict[str, Any]) -> list[str]:
    return [label_of("SemiSFL", differs) for differs, _ in alike_but_for_seed(configs)]


def test_a_group_is_called_by_what_most_do_not_have() -> None:
    single, same = merge(SEMISFL, {"queue": "single"}), merge(SEMISFL, {"flip": False})
    assert labels(SEMISFL, single, same) == [
        "SemiSFL",
        "SemiSFL queue=single",
        "SemiSFL flip=False",
    ]


def test_what_changes_no_number_keeps_seeds_together() -> None:
    often, seldom = (
        SEMISFL | {"seed": every, "runtime": {"evaluate_every": every}} for every in (1, 9)
    )
    assert alike_but_for_seed([often, seldom | {"sinks": ["a.b:C"]}]) == [({}, [0, 1])]
