"""The runs that chose the preset ``images``: their commands are accepted, and their sets can be made again."""

import io
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import tomlkit
from PIL import Image

from benchmarks import own_image_sets, own_images
from semisfl.runs.report import Spread
from semisfl.settings import presets
from semisfl.settings.config import override, parse
from semisfl.settings.sections import needed_confidence

ROOT = Path(__file__).parent.parent.parent
RUNS = [json.loads(line) for line in (ROOT / own_images.FILE).read_text().splitlines()]


def threshold(method: str, value: float) -> list[str]:
    """Return the setting of a confidence threshold, where the method has one."""
    section = method.split("-")[0]
    return [] if method == "supervised" else [f"{section}.confidence_threshold={value:g}"]


def test_every_run_has_settings_that_the_preset_takes() -> None:
    different = {(one["task"], one["method"], tuple(one["set"])) for one in RUNS}
    assert len(different) > 200
    choice = (ROOT / "docs/own-images-choice.md").read_text(encoding="utf-8")
    assert f"All {len(RUNS):,} runs of both pages" in choice
    for task, method, changes in different:
        words = [*own_images.ALL_TASKS[task], *changes, f"method={method}"]
        parse(presets.completed("images", override(presets.values_of("images"), words)))


def test_what_a_printed_command_trains_is_collected_as_what_it_repeats(tmp_path: Path) -> None:
    lines = [line for line in own_images.commands("choice") if "runs/d20-" in line]
    for line in lines:
        words = line.split()
        method, folder = (words[words.index(option) + 1] for option in ("--methods", "--out"))
        run = tmp_path / folder / f"{method}-seed0"
        values = override(
            presets.values_of("images"), [*words[words.index("--set") + 1 :], f"method={method}"]
        )
        config = parse(presets.completed("images", values)).model_dump(
            mode="json", exclude_none=True
        )
        run.mkdir(parents=True)
        (run / "config.toml").write_text(tomlkit.dumps(config))
        (run / "metrics.jsonl").write_text(
            '{"accuracy": 50, "test_accuracy": 49, "bytes_total": 0}'
        )
    keys = ("task", "method", "variant", "set")
    collected = [[one[key] for key in keys] for one in own_images.collect(tmp_path / "runs")]
    recorded = [
        one for one in RUNS if (one["table"], one["task"], one["seed"]) == ("choice", "d20", 0)
    ]
    assert len(lines) == len(recorded) > 2
    assert sorted(collected) == sorted([one[key] for key in keys] for one in recorded)


@pytest.mark.parametrize(
    ("name", "tasks"), [("choice", own_images.TASKS), ("untuned", own_images.UNTUNED)]
)
def test_runs_are_the_preset_and_the_baselines_of_three_seeds(
    name: str, tasks: dict[str, tuple[str, ...]]
) -> None:
    chosen = [one for one in RUNS if one["table"] == name]
    assert {one["task"] for one in chosen} == set(tasks)
    assert {one["variant"] for one in chosen if one["method"] == "semisfl"} == {"mixed"}
    for one in chosen:
        view = ["server.labeled_view=strong"] if one["variant"] == "strong" else []
        assert one["set"] == [*view, *threshold(one["method"], 0.8)]
    cells = {(one["task"], one["method"], one["variant"]) for one in chosen}
    assert len(chosen) == 3 * len(cells) == 3 * 4 * len(tasks)


def test_the_lower_threshold_was_tried_alike_for_both_methods() -> None:
    cells = own_images.read("threshold")
    assert set(cells) == {("semisfl", "t6"), ("fedswitch-sl", "t6")}
    for (method, _), by_task in cells.items():
        assert {task: [one["set"] for one in runs] for task, runs in by_task.items()} == {
            task: [threshold(method, 0.6)] * 3 for task in own_images.TASKS
        }


def test_what_later_changes_of_the_preset_bring_is_what_the_docs_say() -> None:
    chosen, lower = own_images.read("choice"), own_images.read("threshold")
    twice = own_images.read("correction")["semisfl", "twice"]
    words = " ".join((ROOT / "docs/own-images-choice.md").read_text(encoding="utf-8").split())

    def gain(method: str, changed: dict[str, list[dict[str, Any]]]) -> Spread:
        before = chosen[method, "mixed"]
        seeds = [{one["seed"]: one["validation"][-1] for one in before[task]} for task in changed]
        return Spread.of(
            [
                one["validation"][-1] - values[one["seed"]]
                for values, runs in zip(seeds, changed.values(), strict=True)
                for one in runs
            ]
        )

    ours, theirs = lower["semisfl", "t6"], lower["fedswitch-sl", "t6"]
    brings = f"0.6 brings SemiSFL {gain('semisfl', ours)} points and FedSwitch-SL {gain('fedswitch-sl', theirs)}"
    assert brings in words
    assert f"Correcting twice brings {gain('semisfl', twice)} points" in words
    ahead = own_images.averaged(ours) - own_images.averaged(theirs)
    assert f"SemiSFL stays ahead on average, by {ahead:.1f}, and on nine of the ten tasks" in words
    assert f"ahead on nine of the ten tasks, by {ahead:.1f} points on average" in words
    better = [
        fmean(own_images.validation(ours[task])) > fmean(own_images.validation(theirs[task]))
        for task in ours
    ]
    assert sum(better) == 9


def test_the_thresholds_of_few_and_many_classes_are_the_ones_that_were_run() -> None:
    assert [needed_confidence("by_classes", classes) for classes in (2, 10, 36, 37)] == (
        pytest.approx([0.8, 0.6, 0.6, 0.6])
    )
    values = {"t6": 0.6, "t75": 0.75, "t8": 0.8}
    cells = own_images.read("two")
    assert set(cells) == {(m, v) for m in ("semisfl", "fedswitch-sl") for v in values}
    for (method, variant), by_task in cells.items():
        assert {task: [one["set"] for one in runs] for task, runs in by_task.items()} == {
            task: [threshold(method, values[variant])] * 3 for task in own_images.TWO_CLASSES
        }
    for (method, variant), by_task in own_images.untuned().items():
        view = ["server.labeled_view=strong"] if variant == "strong" else []
        for task, runs in by_task.items():
            needed = threshold(method, 0.8 if task == "smile" else 0.6)
            assert [one["set"] for one in runs] == [[*view, *needed]] * 3


def test_the_presets_runs_on_images_that_nobody_tuned_for_change_nothing_but_the_view() -> None:
    for (_, variant), by_task in own_images.read("untuned-preset").items():
        view = ["server.labeled_view=strong"] if variant.startswith("strong") else []
        assert set(by_task) == set(own_images.UNTUNED)
        assert all(one["set"] == view for runs in by_task.values() for one in runs)


def test_on_images_that_nobody_tuned_for_semisfl_is_ahead_as_the_docs_say() -> None:
    words = " ".join((ROOT / "docs/own-images-choice.md").read_text(encoding="utf-8").split())
    ours = own_images.untuned().pop(("semisfl", "mixed"))
    lower = {(*key, "t6"): each for key, each in own_images.read("untuned-t6").items()}
    full = own_images.read("untuned-full").values()
    for others in (own_images.untuned(), own_images.read("untuned") | lower):
        baselines = [each for key, each in others.items() if key[0] != "semisfl"] + [*full]
        ahead = [
            fmean(own_images.test(ours[task]))
            - max(fmean(own_images.test(each[task])) for each in baselines if task in each)
            for task in own_images.UNTUNED
        ]
        assert min(ahead) > 0
        *most, last = (f"{points:.1f}" for points in ahead)
        assert f"by {', '.join(most)} and {last} points" in words


def test_full_model_methods_ran_on_the_same_sets_with_the_presets_views() -> None:
    cells = own_images.read("untuned-full")
    by_classes, high = "mixed-by-classes", "mixed-t95"
    assert set(cells) == {
        *((method, by_classes) for method in ("fedswitch", "semifl")),
        *((method, high) for method in ("semifl", "fedmatch", "fl2")),
    }
    for (method, variant), by_task in cells.items():
        for task in own_images.UNTUNED:
            needed = 0.95 if variant == high else 0.8 if task == "smile" else 0.6
            assert [one["seed"] for one in by_task[task]] == [0, 1, 2]
            assert [one["set"] for one in by_task[task]] == [threshold(method, needed)] * 3


def test_other_sets_are_drawn_from_folders_of_classes() -> None:
    labels = ["b"] * 4 + ["b 2"] * 4 + ["a"] * 4
    images = [(Image.new("L", (40, 40), number * 20), labels[number]) for number in range(12)]
    made = own_image_sets._drawn(images, own_image_sets._resized, 3, 10)
    assert made["classes"].tolist() == ["a", "b 2", "b"]
    assert made["split"].tolist() == [1] * 3 + [0] * 7
    numbers = []
    for row, label in enumerate(made["labels"]):
        image = encoded_in(made, row)
        assert image.size == (32, 32)
        numbers.append(image.getpixel((5, 5))[0] // 20)  # type: ignore[index]
        assert labels[numbers[-1]] == made["classes"][label]
    assert len(set(numbers)) == 10


def encoded_in(made: dict[str, Any], row: int) -> Image.Image:
    start, end = made["offsets"][row : row + 2]
    return Image.open(io.BytesIO(made["bytes"][start:end].tobytes()))


def test_a_part_of_a_set_is_small_and_keeps_labels(tmp_path: Path) -> None:
    encoded = []
    for label in range(12):
        file = tmp_path / "one.png"
        Image.new("RGB", (40, 40), (label * 20, 0, 0)).save(file)
        encoded.append(file.read_bytes())
    shard = tmp_path / "shard.npz"
    np.savez(
        shard,
        bytes=np.frombuffer(b"".join(encoded), np.uint8),
        offsets=np.cumsum([0, *map(len, encoded)]),
        labels=np.arange(12) % 4,
        split=np.array([0] * 8 + [1] * 4, np.uint8),
        classes=np.array(["a", "b", "c", "d"]),
    )
    made = own_image_sets._part([shard], np.random.default_rng(0), 3, 2, [1, 3])
    assert made["classes"].tolist() == ["b", "d"] and made["split"].tolist() == [0, 0, 0, 1, 1]
    for row, label in enumerate(made["labels"]):
        image = encoded_in(made, row)
        assert image.size == (32, 32)
        red = image.getpixel((5, 5))[0] // 20  # type: ignore[index]
        assert red % 4 == (1, 3)[label]


def test_wrong_words_are_answered_with_the_usage() -> None:
    with pytest.raises(SystemExit, match="collect RUNS"):
        own_images.main(["nothing"])
