"""Test the labels of runs: they name the settings that differ and matter."""

from pathlib import Path
from typing import Any

from semisfl.runs import grouping
from semisfl.runs.labels import alike_but_for_seed
from semisfl.settings import presets
from semisfl.settings.presets import merge
from tests.runs.test_report import write_run


def labels(*configs: dict[str, Any]) -> list[str]:
    return [label for label, _ in alike_but_for_seed(configs)]


def test_a_group_is_called_by_what_most_do_not_have(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [50.0])
    write_run(tmp_path / "b", [50.0], queue="single")
    write_run(tmp_path / "c", [50.0], flip=False)
    groups = grouping.group_runs(grouping.find_runs([tmp_path]))
    assert [group.label for group in groups] == [
        "SemiSFL",
        "SemiSFL queue=single",
        "SemiSFL flip=False",
    ]


def test_many_differences_are_cut_short_and_labels_stay_apart(tmp_path: Path) -> None:
    several = {f"key{number}": 1 for number in range(5)}
    write_run(tmp_path / "a", [50.0], name="digits", **several)
    write_run(tmp_path / "b", [50.0], name="cifar10", **dict.fromkeys(several, 2))
    groups = grouping.group_runs(grouping.find_runs([tmp_path]))
    assert [group.label for group in groups] == ["SemiSFL name=digits …", "SemiSFL name=cifar10 …"]


def test_equal_runs_beside_one_with_many_differences_have_labels() -> None:
    same = [{"method": "semisfl", "fedmatch": {"lambda_i": value}} for value in (0.1, 0.2)]
    other = {"method": "semisfl", "mine": {f"key{number}": 1 for number in range(5)}}
    assert labels(*same, other) == ["SemiSFL", "SemiSFL", "SemiSFL mine.key0=1 …"]


def test_tables_of_layers_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    for name, channels in (("a", 4), ("b", 6)):
        path = write_run(tmp_path / name, [50.0])
        with open(path / "config.toml", "a", encoding="utf-8") as file:
            file.write(
                f'[[model.layers]]\nkind = "relu"\n[[model.layers]]\nchannels = {channels}\n'
            )
    groups = grouping.group_runs(grouping.find_runs([tmp_path]))
    assert [group.label for group in groups] == [
        "SemiSFL model.layers[1].channels=4",
        "SemiSFL model.layers[1].channels=6",
    ]


def test_a_variant_is_called_by_its_name() -> None:
    plain, frontier = (presets.values_of(name) for name in ("digits", "digits+frontier"))
    semisfl = {"method": "semisfl"}
    assert labels(semisfl | plain, semisfl | frontier) == ["SemiSFL", "SemiSFL frontier"]
    in_part = merge(frontier, {"semisfl": {"client_teacher": "frozen"}})
    names = labels(semisfl | plain, semisfl | frontier, semisfl | in_part)
    assert len(set(names)) == 3
    assert not any(label.endswith(" frontier") for label in names), "the last has it in part"


def test_a_variant_is_called_by_its_name_though_a_preset_has_a_part_of_it() -> None:
    semisfl = {"method": "semisfl"}
    plain, frontier = (presets.values_of(name) for name in ("cifar10", "cifar10+frontier"))
    assert plain["semisfl"].items() <= frontier["semisfl"].items()
    assert labels(semisfl | plain, semisfl | frontier) == ["SemiSFL", "SemiSFL frontier"]
    # One setting is clearer than the name.
    frozen = merge(frontier, {"semisfl": {"client_teacher": "frozen"}})
    assert labels(semisfl | frontier, semisfl | frozen) == [
        "SemiSFL semisfl.client_teacher=ema",
        "SemiSFL semisfl.client_teacher=frozen",
    ]


def test_what_changes_no_number_tells_apart_only_if_nothing_else_does() -> None:
    often, seldom = ({"method": "semisfl", "runtime": {"checkpoint_every": n}} for n in (1, 9))
    other = merge(seldom, {"data": {"labeled": 10}})
    assert labels(often, other) == ["SemiSFL data.labeled=40", "SemiSFL data.labeled=10"]
    assert labels(often, seldom) == [
        "SemiSFL runtime.checkpoint_every=1",
        "SemiSFL runtime.checkpoint_every=9",
    ]


def test_an_older_file_is_as_by_default_in_what_it_does_not_have() -> None:
    older = {"method": "semisfl", "data": {"labeled": 10}}
    newer = {"method": "semisfl", "data": {"labeled": 20}, "semisfl": {"client_teacher": "frozen"}}
    assert labels(older, newer) == ["SemiSFL data.labeled=10", "SemiSFL data.labeled=20"]


def test_settings_of_other_methods_do_not_tell_apart() -> None:
    one, two = (
        {"method": "semisfl", "semisfl": {"temperature": t}, "fedmatch": {"lambda_i": t}}
        for t in (0.1, 0.2)
    )
    assert labels(one, two) == [
        "SemiSFL semisfl.temperature=0.1",
        "SemiSFL semisfl.temperature=0.2",
    ]


def test_settings_of_other_aggregation_rules_do_not_tell_apart() -> None:
    older = {"method": "semisfl", "seed": 1, "robust": {"trimmed_mean": {"share": 0.3}}}
    assert labels({"method": "semisfl"}, older) == ["SemiSFL"]
    chosen = [
        merge(older, {"robust": {"aggregate": "trimmed_mean", "trimmed_mean": {"share": s}}})
        for s in (0.1, 0.2)
    ]
    assert labels(*chosen) == [f"SemiSFL robust.trimmed_mean.share={share}" for share in (0.1, 0.2)]


def test_a_setting_of_semisfl_does_not_keep_the_seeds_of_another_method_apart() -> None:
    seeds = [
        {"seed": seed, "semisfl": {"client_teacher": kind}, "teacher": {"ema_decay": 0.9}}
        for seed, kind in enumerate(("frozen", "ema"))
    ]
    assert labels(*({"method": "fedswitch-sl"} | one for one in seeds)) == ["FedSwitch-SL"]
    assert len(labels(*({"method": "semisfl"} | one for one in seeds))) == 2


def test_runs_of_a_method_that_is_not_installed_are_told_apart_too() -> None:
    for name, title in (("nowhere.at_all:Mine", "Mine"), ("nowhere", "nowhere")):
        one, two = ({"method": name, "rounds": rounds} for rounds in (1, 2))
        assert labels(one, two) == [f"{title} rounds=1", f"{title} rounds=2"]


def test_what_changes_no_number_keeps_seeds_together_unless_one_is_there_twice() -> None:
    often, seldom = (
        {"method": "semisfl", "seed": seed, "runtime": {"evaluate_every": every}}
        for seed, every in ((0, 1), (1, 9))
    )
    older = {"method": "semisfl", "seed": 2}
    foreign = {"method": "semisfl", "seed": 3, "fedmatch": {"lambda_i": 0.5}}
    assert alike_but_for_seed([often, seldom, older, foreign]) == [("SemiSFL", [0, 1, 2, 3])]
    again = merge(seldom, {"seed": 0})
    groups = dict(alike_but_for_seed([often, seldom, again]))
    assert groups == {
        "SemiSFL runtime.evaluate_every=1": [0],
        "SemiSFL runtime.evaluate_every=9": [1, 2],
    }


def test_a_sweep_of_another_methods_setting_makes_no_further_seeds() -> None:
    swept = [
        {"method": "supervised", "seed": seed, "semisfl": {"temperature": t}}
        for t in (0.1, 0.2)
        for seed in (0, 1)
    ]
    assert [places for _, places in alike_but_for_seed(swept)] == [[0, 1], [2, 3]]
