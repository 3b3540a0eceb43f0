"""Runs: golden losses, learning, stopping and resuming, and everything that can go wrong with files."""

import errno
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from semisfl import seeds
from semisfl.data import sources
from semisfl.data.dataset import Dataset
from semisfl.data.partition import Partition
from semisfl.methods.base import Setup
from semisfl.methods.semisfl import SemiSFL
from semisfl.metrics import RoundMetrics
from semisfl.runs import checkpoint, sinks
from semisfl.runs.checkpoint import CheckpointError
from semisfl.runs.directory import RunDirectory
from semisfl.runs.experiment import assemble
from semisfl.runs.portable import check_images
from semisfl.runs.reading import read_rounds
from semisfl.runs.run_data import divide
from semisfl.runs.start import resume, train
from semisfl.settings import config, presets
from semisfl.settings.config import Config, ConfigError
from tests import twin
from tests.toy import but_for_time
from tests.twin import bn_model, toy_data

DATA = toy_data()
SMALL = {**twin.SMALL, "rounds": 5, "runtime": {"checkpoint_every": 2}}


def small(*assignments: str) -> Config:
    return config.parse(config.override(SMALL, list(assignments)))


# --- training ----------------------------------------------------------------------------------------

GOLDEN_SETTINGS = [
    "rounds=3",
    "seed=1",
    "clients.total=4",
    "clients.active=2",
    "clients.batch=8",
    "clients.steps=2",
    "server.batch=8",
    "server.steps=3",
    "model.projection=16",
    "semisfl.confidence_threshold=0.1",
    "runtime.evaluate_every=3",
]
GOLDEN: dict[str, dict[str, list[float]]] = {
    "semisfl": {
        "loss_supervised": [5.030084, 7.011985, 6.428063],
        "loss_semi": [5.277929, 6.891420, 7.134530],
        "loss_clustering": [3.725459, 4.615002, 4.907392],
        "mask_rate": [0.0, 0.0, 0.0],
        "impurity": [1.0, 0.9375, 0.75],
    },
    "supervised": {"loss_supervised": [2.344422, 2.230277, 2.359235]},
}


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Return the digits with few test images, because these tests do not look at accuracies."""
    data = sources.load("digits", cache=tmp_path_factory.mktemp("digits"))
    return replace(data, test_images=data.test_images[:100], test_labels=data.test_labels[:100])


@pytest.mark.parametrize("method", GOLDEN)
def test_golden_losses(method: str, digits: Dataset) -> None:
    """A few steps on the digits: any change of draws, augmentation, losses or updates is noticed."""
    values = config.override(presets.values_of("digits"), [*GOLDEN_SETTINGS, f"method={method}"])
    rows = train(config.parse(values), data=digits, device="cpu").rounds
    for name, expected in GOLDEN[method].items():
        assert [row[name] for row in rows] == pytest.approx(expected, abs=1e-4), name


def test_learns_a_toy_set() -> None:
    settings = small("method=supervised", "rounds=8", "server.steps=8", "clients.batch=16")
    result = train(settings, data=DATA, device="cpu")
    assert result.rounds[0]["accuracy"] < 80
    assert result.accuracy > 90 and result.best >= result.accuracy
    assert result.rounds[-1]["loss_supervised"] < result.rounds[0]["loss_supervised"]
    with torch.no_grad():
        images = (DATA.test_images.float() / 255 - 0.4) / 0.2
        hits = (result.model.eval()(images).argmax(1) == DATA.test_labels).float().mean()
    assert 100 * float(hits) == pytest.approx(result.accuracy)


def test_rows_hold_what_is_promised() -> None:
    rows = train(small("runtime.evaluate_every=2"), data=DATA, device="cpu").rounds
    assert [row["round"] for row in rows] == [0, 1, 2, 3, 4]
    assert ["accuracy" in row for row in rows] == [False, True, False, True, True]
    row = rows[-1]
    assert row["accuracy"] == row["accuracy_teacher"] and "accuracy_student" in row
    for name in (
        "learning_rate",
        "supervised_steps",
        "loss_supervised",
        "loss_semi",
        "mask_rate",
        "seconds",
    ):
        assert isinstance(row[name], float | int), name
    assert len(row["coverage_by_class"]) == 3 and len(row["coverage_by_client"]) == 3
    assert row["bytes_total"] == sum(row["bytes"].values()) == 5 * rows[0]["bytes_total"]
    json.dumps(rows)


def test_a_run_directory_is_for_its_owner_alone(tmp_path: Path) -> None:
    train(small("method=supervised", "rounds=1"), data=DATA, device="cpu", out=tmp_path / "run")
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700


def test_same_seed_same_run_other_seed_other_run() -> None:
    one, same, other = (
        train(small("rounds=2", f"seed={seed}"), data=DATA, device="cpu") for seed in (3, 3, 4)
    )
    assert but_for_time(one.rounds) == but_for_time(same.rounds) != but_for_time(other.rounds)


# --- stopping and resuming ---------------------------------------------------------------------------


CASES: dict[str, tuple[list[str], Callable[[], Any]]] = {
    "semisfl": ([], lambda: None),
    "single": (["semisfl.queue=single", "server.pretrain_rounds=1"], lambda: None),
    "bn and dropout": (["semisfl.client_teacher=ema"], bn_model),
    "dropout on clients": (["model.cut=12"], bn_model),
    "controller": (
        ["controller.period=2", "controller.min_steps_factor=0"],
        lambda: None,
    ),
    "supervised": (["method=supervised"], bn_model),
}


SLOW = ("single", "dropout on clients")


@contextmanager
def stopping_at(step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let every run stop after its ``step``-th iteration, as if a signal had come."""
    seen = 0
    make_step = Setup.make_step

    def repeat(self: Setup, call: Callable[[], None], **more: bool) -> Callable[[], None]:
        def counted() -> None:
            nonlocal seen
            seen += 1
            self.stop.requested = self.stop.requested or seen == step
            call()

        return make_step(self, counted, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Setup, "make_step", repeat)
        yield


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Return an undisturbed run of `small`."""
    place = tmp_path_factory.mktemp("runs") / "whole"
    train(small(), data=DATA, device="cpu", out=place)
    return RunDirectory.open(place)


def iterations(case: str) -> int:
    return 5 * (4 if case == "supervised" else 4 + 3)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else []) for case in CASES],
)
def test_resume_is_bit_identical(
    case: str, uninterrupted: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assignments, model = CASES[case]
    settings = small(*assignments)
    if assignments:
        train(settings, data=DATA, model=model(), device="cpu", out=tmp_path / "whole")
        uninterrupted = RunDirectory.open(tmp_path / "whole")
    # At a random iteration, and in the very first one; each run is interrupted twice.
    rng = seeds.generator(0, "stop", case)
    anywhere = int(rng.integers(2, iterations(case) - 8))
    for first in (1, anywhere) if case == "semisfl" else (anywhere,):
        path = tmp_path / f"stopped at {first}"
        with stopping_at(first, monkeypatch):
            result = train(settings, data=DATA, model=model(), device="cpu", out=path)
        assert result.stopped and len(result.rounds) < 5
        with stopping_at(int(rng.integers(1, 6)), monkeypatch):
            assert resume(path, data=DATA, model=model(), device="cpu").stopped
        result = resume(path, data=DATA, model=model(), device="cpu")
        assert not result.stopped and len(result.rounds) == 5
        again = RunDirectory.open(path)
        for name in ("latest", "best"):
            assert checkpoint.digest(again.load(name)) == checkpoint.digest(
                uninterrupted.load(name)
            ), name
        assert (
            but_for_time(read_rounds(again.path, dict))
            == but_for_time(read_rounds(uninterrupted.path, dict))
            == but_for_time(result.rounds)
        )


def test_resume_after_a_crash_repeats_the_rounds_since_the_checkpoint(
    uninterrupted: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_round = SemiSFL.round

    def crash(self: SemiSFL, round_index: int) -> Any:
        if round_index == 3:
            raise RuntimeError("power failure")
        return run_round(self, round_index)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power failure"):
        patch.setattr(SemiSFL, "round", crash)
        train(small(), data=DATA, device="cpu", out=tmp_path / "crashed")
    crashed = RunDirectory.open(tmp_path / "crashed")
    with open(crashed.path / "metrics.jsonl", "a") as file:
        file.write('{"round": 3, "loss_su')  # a line that was cut off
    assert crashed.load("latest")["round"] == 2
    resume(tmp_path / "crashed", data=DATA, device="cpu")
    assert but_for_time(read_rounds(crashed.path, dict)) == but_for_time(
        read_rounds(uninterrupted.path, dict)
    )
    assert checkpoint.digest(crashed.load()) == checkpoint.digest(uninterrupted.load())


def test_resuming_a_finished_run_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = train(small("rounds=2"), data=DATA, device="cpu", out=tmp_path / "run")
    before = (tmp_path / "run" / "latest.safetensors").read_bytes()
    caplog.set_level("INFO")
    result = resume(tmp_path / "run", data=DATA, device="cpu")
    assert "2 rounds done" in caplog.text and "rounds 3 to 2" not in caplog.text
    assert (result.accuracy, result.best, result.stopped) == (first.accuracy, first.best, False)
    assert (tmp_path / "run" / "latest.safetensors").read_bytes() == before


# --- the run directory -------------------------------------------------------------------------------


def test_a_run_leaves_its_files(tmp_path: Path) -> None:
    settings = small("data.name=bilder/ü 😀", "fedswitch.iid_threshold=inf", "rounds=3")
    result = train(settings, data=replace(DATA, name="ü 😀"), device="cpu", out=tmp_path / "run")
    directory = RunDirectory.open(tmp_path / "run")
    assert directory.config() == settings
    assert {"semisfl", "torch", "python"} <= json.loads(
        (directory.path / "environment.json").read_text()
    ).keys()
    assert "rounds 1 to 3" in (directory.path / "run.log").read_text()
    assert read_rounds(directory.path, dict) == result.rounds
    best = max(row["accuracy"] for row in result.rounds)
    assert best == result.best
    assert directory.load("best").keys() == {"round", "model"}, "no training state"
    sizes = [(directory.path / f"{name}.safetensors").stat().st_size for name in ("best", "latest")]
    assert 2 * sizes[0] < sizes[1]
    assert directory.load("latest")["round"] == 3
    assert not [path for path in directory.path.iterdir() if path.suffix == ".tmp"]


# --- damage and full disks ---------------------------------------------------------------------------

STATE = {
    "round": 3,
    "weights": {"a": torch.arange(6.0).view(2, 3), "n": torch.tensor(4), "none": torch.zeros(0, 2)},
    "list": [1.5, torch.tensor([True, False]), None, "text"],
}


def test_checkpoint_round_trip(tmp_path: Path) -> None:
    file = tmp_path / "state.safetensors"
    checkpoint.write(file, STATE)
    back = checkpoint.read(file)
    assert checkpoint.digest(back) == checkpoint.digest(STATE)
    assert back["round"] == 3 and back["list"][2:] == [None, "text"]
    assert torch.equal(back["weights"]["a"], STATE["weights"]["a"])  # type: ignore[index]
    assert list(tmp_path.iterdir()) == [file]


def test_digest_sees_everything() -> None:
    seen = {checkpoint.digest(STATE)}
    for change in (
        {"round": 4},
        {"list": [1.5, torch.tensor([True, True]), None, "text"]},
        {"weights": {**STATE["weights"], "n": torch.tensor(4, dtype=torch.int32)}},  # type: ignore[dict-item]
        {"weights": {**STATE["weights"], "a": torch.arange(6.0).view(3, 2)}},  # type: ignore[dict-item]
        {"more": 1},
    ):
        seen.add(checkpoint.digest({**STATE, **change}))
    assert len(seen) == 6


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "state.safetensors"
    checkpoint.write(file, STATE)
    content, expected = file.read_bytes(), checkpoint.digest(STATE)
    for place in range(len(content)):
        file.write_bytes(
            content[:place] + bytes([content[place] ^ (1 << place % 8)]) + content[place + 1 :]
        )
        try:
            # Padding and the order of the header's names carry nothing.
            assert checkpoint.digest(checkpoint.read(file)) == expected
        except CheckpointError as error:
            assert str(file) in str(error) and "\n" not in str(error)


def test_full_disk_keeps_the_previous_checkpoint_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = False

    def fsync(_: int) -> None:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def append(path: Path, data: bytes, really: Any = sinks.append_whole) -> None:
        fsync(0)
        really(path, data)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(sinks, "append_whole", append)

    def fill(row: dict[str, Any]) -> None:
        nonlocal full
        full = row["round"] in (1, 2)

    result = train(small("rounds=4"), data=DATA, device="cpu", out=tmp_path / "run", observe=fill)
    assert not result.stopped and len(result.rounds) == 4
    directory = RunDirectory.open(tmp_path / "run")
    # Round 3's checkpoint met the full disk: the one of round 2 is whole. Metrics were in memory.
    assert directory.load("latest")["round"] == 2
    assert [row["round"] for row in read_rounds(directory.path, dict)] == [0, 1]
    assert "No space left on device; the previous one is kept" in caplog.text
    assert not [path for path in directory.path.iterdir() if path.suffix == ".tmp"]
    full = False
    again = resume(tmp_path / "run", data=DATA, device="cpu")
    assert (
        [row["round"] for row in read_rounds(directory.path, dict)]
        == [0, 1, 2, 3]
        == [r["round"] for r in again.rounds]
    )


@pytest.mark.parametrize(
    ("damage", "left"),
    [
        (lambda text: text.removesuffix("\n"), [0, 1]),
        (lambda text: text.splitlines()[0] + "\n" + "\0" * 200, [0]),
        (lambda text: text.splitlines()[0] + "\n5\n", [0]),
    ],
    ids=["no newline", "zeros", "no row"],
)
def test_metrics_cut_off_by_a_crash_are_repaired(
    damage: Any, left: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(small("method=supervised", "rounds=3"), data=DATA, device="cpu", out=tmp_path / "run")
    directory, file = RunDirectory.open(tmp_path / "run"), tmp_path / "run" / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    file.write_text(damage("".join(lines[:2])), encoding="utf-8")
    assert [row["round"] for row in directory.keep_metrics_before(2)] == left
    assert ("has only 1 of the 2 rounds before" in caplog.text) == (len(left) == 1)
    with open(file, "a", encoding="utf-8") as stream:
        stream.write(lines[2])
    assert [row["round"] for row in read_rounds(directory.path, dict)] == [*left, 2]
    file.unlink()
    assert directory.keep_metrics_before(2) == [] and not file.exists()
    assert "has only 0 of the 2 rounds before" in caplog.text


def test_a_run_does_not_go_on_with_other_images(tmp_path: Path) -> None:
    train(small("rounds=1"), data=DATA, device="cpu", out=tmp_path / "run")
    other = replace(DATA, classes=("x", *DATA.classes[1:]))
    with pytest.raises(ValueError, match="the run began with images whose classes is"):
        resume(tmp_path / "run", data=other, device="cpu")
    fewer = replace(DATA, test_images=DATA.test_images[:-1], test_labels=DATA.test_labels[:-1])
    with pytest.raises(ConfigError, match="images that rounds are judged on are not those"):
        resume(tmp_path / "run", data=fewer, device="cpu")
    for other in (replace(DATA, mean=(0.1,)), replace(DATA, std=(0.9,))):
        with pytest.raises(ConfigError, match=r"the run began with images whose (mean|std) is"):
            resume(tmp_path / "run", data=other, device="cpu")
    inverted = replace(DATA, images=255 - DATA.images)
    with pytest.raises(
        ConfigError, match="the labelled images are not those that the run began with"
    ):
        resume(tmp_path / "run", data=inverted, device="cpu")
    resume(tmp_path / "run", data=DATA, partition=divide(small("rounds=1"), DATA), device="cpu")


def test_a_server_goes_on_with_more_labels_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(small("rounds=1"), data=DATA, device="cpu", out=tmp_path / "run")
    state = checkpoint.read(tmp_path / "run" / "latest.safetensors")
    fewer = replace(DATA, test_images=DATA.test_images[:-1], test_labels=DATA.test_labels[:-1])
    before, now = state["model"]["description"], assemble(small("rounds=1"), fewer, device="cpu")
    check_images(before, now.description.as_dict(), may_grow=True)
    assert "images that rounds are judged on are not those that the run began with" in caplog.text


def test_numbers_that_json_lacks_are_null(tmp_path: Path) -> None:
    file = sinks.MetricsFile(tmp_path / "metrics.jsonl")
    file.write(RoundMetrics(round=0, loss_semi=math.nan, accuracies={"student": math.inf}))
    record = json.loads(file.path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert record["loss_semi"] is None and record["accuracy_student"] is None


# --- bad input ---------------------------------------------------------------------------------------


def test_partition_and_clients_must_agree() -> None:
    own = Partition(np.arange(30), tuple(np.array_split(np.arange(30, 240), 4)))
    with pytest.raises(
        ValueError, match=r"the data has 4 clients but clients.total = 5; set clients.total = 4"
    ):
        train(small(), data=DATA, partition=own, device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_absent_gpu(name: str) -> None:
    with pytest.raises(
        ValueError, match="no CUDA device is available here; use --device cpu or auto"
    ):
        train(small(), data=DATA, device=name)
