"""Recorded runs, replayed: bytes of real runs, seconds worked out by hand."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from reproduction import records
from reproduction.paper import measures
from semisfl.cli.main import main
from semisfl.costs.clock import DeviceKind, LinkSpeed, Profile, World, time_round
from semisfl.costs.replay import replay
from semisfl.costs.rounds import ImageFacts, RoundCosts, recorded_images
from semisfl.runs.report import read_run
from semisfl.runs.start import train
from semisfl.settings import config
from tests import toy

WORLD = World(
    LinkSpeed(8, 8),
    LinkSpeed(16, 16),
    0.1,
    Profile(server_gflops=2, devices=(DeviceKind(name="one", gflops=0.5),)),
)
"""A megabyte per second up, two down."""


def semisfl_seconds(batch: int, steps: int, supervised: int, server_batch: int) -> float:
    """Return the seconds of a round of the digits' CNN with two equal clients."""
    bottom_bytes = 4 * ((25 * 32 + 32) + (25 * 32 * 64 + 64))
    features = 4 * batch * 1024
    bottom = 2 * (25 * 32 * 24 * 24 + 25 * 32 * 64 * 8 * 8)
    top, head = 2 * (1024 * 512 + 512 * 10), 2 * (1024 * 1024 + 1024 * 128)
    # The teacher gives keys: its bottom and head run, its top does not.
    alone = supervised * server_batch * (4 * (bottom + head) + 3 * top) / 2e9
    server = 2 * batch * 4 * (top + head) / 2e9
    forward = backward = 2 * batch * bottom / 0.5e9
    first = 2 * bottom_bytes / 2e6 + forward + 2 * features / 1e6 + 0.2
    step = server + features / 2e6 + backward + forward + 2 * features / 1e6 + 0.2
    last = server + features / 2e6 + backward + bottom_bytes / 1e6 + 0.2
    return alone + first + (steps - 1) * step + last


def digits(**changes: object) -> config.Config:
    values = {
        "data": {"name": "digits"},
        "clients": {"total": 2, "active": 2, "batch": 8, "steps": 3},
        "server": {"batch": 4, "steps": 5},
    }
    return config.parse(values | changes)


def test_a_round_of_semisfl_by_hand() -> None:
    priced = RoundCosts.of(digits(), ImageFacts((1, 28, 28), 10, 100))
    timing = time_round(0, priced.usual_work(range(2)), WORLD)
    assert timing.seconds == pytest.approx(semisfl_seconds(8, 3, 5, 4))


def test_a_round_of_whole_models_by_hand() -> None:
    """FedSwitch: down with the teacher, a look at 100 and 50 images, three steps, up; eight messages."""
    images = ImageFacts((1, 28, 28), 10, 75, {0: 100, 1: 50})
    priced = RoundCosts.of(digits(method="fedswitch"), images)
    full = 4 * ((25 * 32 + 32) + (25 * 32 * 64 + 64) + (1024 * 512 + 512) + (512 * 10 + 10))
    flops = 2 * (25 * 32 * 24 * 24 + 25 * 32 * 64 * 8 * 8 + 1024 * 512 + 512 * 10)
    alone = 5 * 4 * 3 * flops / 2e9
    client = [(look + 4 * 8 * 3) * flops / 0.5e9 for look in (100, 50)]
    sending = 2 * full / 2e6 + full / 1e6 + 8 * 0.1
    timing = time_round(0, priced.usual_work(range(2)), WORLD)
    assert timing.seconds == pytest.approx(alone + client[0] + sending)
    assert timing.clients[1].computing == pytest.approx(client[1])
    assert timing.clients[1].waiting == pytest.approx(alone + client[0] - client[1])


def test_batchnorms_statistics_are_a_phase_of_their_own() -> None:
    layers = toy.values("semifl", f"model.layers={toy.RESIDUAL}").model.layers
    priced = RoundCosts.of(
        digits(method="semifl", model={"layers": layers}), ImageFacts((3, 12, 12), 4, 10)
    )
    training, statistics = priced.usual_work([1]).phases
    sizes = priced.sizes
    assert (training[0].down, training[0].up) == (sizes.statistics, sizes.full)
    assert (statistics[0].down, statistics[0].up) == (sizes.full, sizes.statistics)
    assert statistics[0].before == 10 * priced.cut.flops


@pytest.mark.parametrize(
    ("plain", "codec"),
    [("compare/semisfl", codec) for codec in ("int8", "bf16", "fp16")],
)
def test_a_committed_run_recoded_sends_what_the_run_with_that_codec_sent(
    plain: str, codec: str
) -> None:
    replayed = measures.replayed(records.run(plain), WORLD, codec)
    real = records.run(f"codecs/cifar10-{codec}")
    assert [row.bytes_total for row in replayed.rounds] == [row.bytes_total for row in real.rounds]
    assert replayed.config.wire.models == codec


@pytest.mark.parametrize("every", [24, pytest.param(1, marks=pytest.mark.slow)])
def test_committed_runs_sum_up_to_what_they_recorded(every: int) -> None:
    runs = [
        records.run_of(study, one)
        for study in records.studies()
        for one in records.entries(study)
        if "settings" in one and "metrics" in one
    ][::every]
    assert len(runs) > 15
    for run in runs:
        short = replace(run, rounds=run.rounds[:10])
        replayed = measures.replayed(short, WORLD)
        assert replayed.rounds[-1].bytes_total == short.rounds[-1].bytes_total, run.path
        computed = replayed.config.method != "probe"
        assert all((seconds > 0) is computed for seconds in replayed.seconds), run.path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train toy runs of each kind of method, and return their folder."""
    folder = tmp_path_factory.mktemp("runs")
    data = toy.dataset()
    for method, seed in (("semisfl", 0), ("semisfl", 1), ("fedswitch", 0)):
        options = toy.values(method, f"seed={seed}", f"model.layers={toy.RESIDUAL}")
        place = folder / f"{method}-{seed}"
        train(options, data=data, partition=toy.partition(data), device="cpu", out=place)
    return folder


def test_a_run_directory_says_what_a_replay_must_know(recorded: Path) -> None:
    run = read_run(recorded / "semisfl-0")
    images = recorded_images(config.parse(run.config), run.path)
    assert images.shape == (3, 12, 12) and images.classes == toy.CLASSES
    held = toy.partition(toy.dataset()).clients
    assert images.each == {client: len(rows) for client, rows in enumerate(held)}


def test_a_run_that_cannot_be_replayed_is_named(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its name tells which run to leave out: here one with an unknown method, or unknown images."""
    for key, old, new in (("method", "semisfl", "mine"), ("data", "toy", "nowhere")):
        place = tmp_path / key
        shutil.copytree(recorded / "semisfl-0", place)
        for file in place.glob("*.safetensors"):
            file.unlink()
        settings = (place / "config.toml").read_text(encoding="utf-8")
        assert f' = "{old}"' in settings
        changed = settings.replace(f' = "{old}"', f' = "{new}"')
        (place / "config.toml").write_text(changed, encoding="utf-8")
        assert main(["replay", str(recorded / "semisfl-1"), str(place)]) == 2
        error = " ".join(capsys.readouterr().err.split())
        assert f"{key} cannot be replayed: {key}" in error


def test_slower_links_take_longer_and_the_seed_alone_decides(recorded: Path) -> None:
    run = read_run(recorded / "semisfl-0")
    fast, slow = (replay(run, replace(WORLD, up=LinkSpeed(low, 8))) for low in (8, 0.8))
    assert all(a < b for a, b in zip(fast.seconds, slow.seconds, strict=True))
    again = replay(run, replace(WORLD, up=LinkSpeed(0.8, 8), seed=77))
    assert again.seconds == slow.seconds, "the run's own seed counts"
    assert [row.accuracy for row in slow.rounds] == [row.accuracy for row in run.rounds]
    assert slow.rounds[-1].bytes_total == run.rounds[-1].bytes_total


def test_the_command(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = str(tmp_path / "cost.png")
    words = ["replay", str(recorded), "--codec", "int8", "--out", picture, "--target", "1"]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [result["label"] for result in answer["results"]] == ["FedSwitch", "SemiSFL"]
    assert any("not simulated" in note for note in answer["notes"])
    assert Path(answer["picture"]).stat().st_size > 10_000
    semisfl = answer["results"][1]
    assert len(semisfl["rounds_of_runs"]) == 2 and semisfl["to_target"]["reached"] == 2
    rounds = semisfl["rounds_of_runs"][str(recorded / "semisfl-1")]
    for one in rounds:
        assert len(one["clients"]) == 2 and one["exact"]
        for client in one["clients"].values():
            spent = client["computing"] + client["sending"] + client["waiting"]
            assert spent == pytest.approx(one["seconds"])
            assert set(client["bytes"]) == {
                *("model_down", "teacher_down", "gradients_down", "features_up", "model_up"),
            }
    assert sum(semisfl["traffic"].values()) == 2 * semisfl["bytes"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    for word in ("hours", "features", "gradients", "not simulated", "to reach 1 %"):
        assert word in printed
    assert main(["replay", str(recorded), "--codec", "morse"]) == 2
    assert "morse" in capsys.readouterr().err
    assert main(["replay", str(tmp_path)]) == 2
