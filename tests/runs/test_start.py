"""Starting and resuming: what is found before a directory is made, and what K_min is reckoned with."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from semisfl.data.partition import Partition
from semisfl.fleet.setup import NetworkOptions
from semisfl.methods.semisfl import SemiSFL
from semisfl.net.tls import certs
from semisfl.runs import checkpoint, start
from semisfl.runs.directory import RunDirectory
from semisfl.runs.run_data import load_images
from semisfl.runs.start import resume, train
from semisfl.settings.config import Config, ConfigError
from tests.disk import largest_file
from tests.net.harness import SIDE, network, tiny, toy_data
from tests.processes import Forked


@pytest.mark.parametrize(
    ("configured", "passed", "recorded"),
    [
        ("digits", "toy", "toy"),
        ("photos/toy", "toy", "photos/toy"),
        ("toy.npz", "toy", "toy.npz"),
        ("photos/toy_0of2.npz", "toy", "photos/toy_0of2.npz"),
        ("digits", "dig", "dig"),
        ("digits", "", ""),  # of a folder that was called "."
        (".", "", "."),
    ],
)
def test_a_run_records_the_images_that_were_passed(
    configured: str, passed: str, recorded: str, tmp_path: Path
) -> None:
    data, partition = toy_data()
    data = replace(data, name=passed)
    config = tiny(rounds=1, data={"name": configured})
    train(config, data=data, partition=partition, device="cpu", out=tmp_path / "run")
    assert RunDirectory.open(tmp_path / "run").config().data.name == recorded


def test_a_run_records_that_its_images_were_divided_by_a_program(tmp_path: Path) -> None:
    rows = np.arange(60)
    partition = Partition(rows[:12], (rows[12:20], rows[20:60]))
    clients = {"total": 2, "active": 2, "batch": 4, "steps": 1}
    config = tiny(rounds=1, data={"name": "digits", "labeled": 40}, clients=clients)
    data = load_images("digits", config)
    for passed in (None, data):
        out = tmp_path / str(passed is None)
        train(config, data=passed, partition=partition, device="cpu", out=out)
        recorded = RunDirectory.open(out).config().data
        assert (recorded.labeled, recorded.partition.kind) == (12, "own")
        assert resume(out, data=passed, partition=partition, device="cpu").rounds
        with pytest.raises(ConfigError, match="a program divided these images; pass its Partition"):
            resume(out, device="cpu")
        other = Partition(rows[1:13], (rows[13:20], rows[20:60]))
        with pytest.raises(
            ValueError, match="labelled images are not those that the run began with"
        ):
            resume(out, data=passed, partition=other, device="cpu")
    # As few as the configuration could not divide: its own division is not made.
    few = replace(partition, labeled=rows[:4])
    train(config, partition=few, device="cpu", out=tmp_path / "few")
    assert RunDirectory.open(tmp_path / "few").config().data.labeled == 4


@pytest.fixture
def labeled(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for part in ("train", "test"):
        for name in ("a", "b"):
            folder = tmp_path / "labeled" / part / name
            folder.mkdir(parents=True)
            for number in range(4):
                pixels = rng.integers(0, 256, (SIDE, SIDE), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "labeled"


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    certs.make_authority(tmp_path / "certs")
    certs.make_server(tmp_path / "certs", ["localhost"])
    return tmp_path / "certs"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- everything that can be wrong ----------------------------------------------------------------


MISTAKES: dict[str, tuple[Callable[[Config], Config], dict[str, Any], str]] = {
    "port": (lambda config: config, {"listen": "no.such.host.invalid:1"}, "cannot listen on"),
    "certificates": (lambda config: config, {"certificates": "missing"}, "missing"),
    "no certificates": (lambda config: config, {"certificates": None}, "needs certificates"),
    "model": (
        lambda config: config.model_copy(
            update={"model": config.model.model_copy(update={"cut": 40})}
        ),
        {},
        "model.cut = 40 is outside the model",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_wrong_with_a_server_leaves_its_directory_as_it_was(
    mistake: str, labeled: Path, authority: Path, tmp_path: Path
) -> None:
    change, options, error = MISTAKES[mistake]
    place = tmp_path / "runs" / "served"
    before = contents(tmp_path)
    chosen: dict[str, Any] = {"listen": "127.0.0.1:0", "certificates": authority, **options}
    if isinstance(chosen["certificates"], str):
        chosen["certificates"] = tmp_path / chosen["certificates"]
    config, data = change(tiny(2)), load_images(str(labeled), tiny(2))
    with pytest.raises(ValueError, match=error):
        train(config, data=data, device="cpu", out=place, network=NetworkOptions(**chosen))
    assert contents(tmp_path) == before
    assert not (tmp_path / "runs").exists()


def test_a_failure_between_the_directory_and_the_first_round_is_undone(tmp_path: Path) -> None:
    data, partition = toy_data(2)
    place = tmp_path / "run"
    with (
        pytest.raises(RuntimeError, match="no paper"),
        start.begin(tiny(2), data=data, partition=partition, device="cpu", out=place),
    ):
        (place / "partition.png").write_bytes(b"half a picture")
        raise RuntimeError("no paper")
    assert not place.exists()


# --- |D_l| / |D| ---------------------------------------------------------------------------------


def share(net: Any) -> float:
    method = net.experiment.method
    assert isinstance(method, SemiSFL)
    controller = method.controller
    return controller.min_supervised_steps / (
        controller.config.min_steps_factor * controller.cross_entity_steps
    )


def test_the_share_of_labels_follows_clients_that_join_later(tmp_path: Path) -> None:
    """8 labelled images and 12 a client: K_min comes of 8 / 56 once four clients came, of 8 / 32 before."""
    config = tiny(4, clients={"active": 2}, rounds=1)
    with network(config) as net:
        for client in (0, 1):
            net.join(client)
        net.wait_for(2)
        assert share(net) == pytest.approx(8 / 32)
        for client in (2, 3):
            net.join(client)
        net.wait_for(4)
        assert share(net) == pytest.approx(8 / 56)
        net.clients[3].kill()
        checkpoint.write(tmp_path / "state.safetensors", net.experiment.state_dict())
    # A restarted server, to which one of them never comes back, still knows of its images.
    with network(config) as net:
        net.experiment.load_state_dict(checkpoint.read(tmp_path / "state.safetensors"))
        for client in (0, 1):
            net.join(client)
        net.wait_for(2)
        assert share(net) == pytest.approx(8 / 56)


# --- threads -------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_a_checkpoint_that_was_read_is_not_kept_in_use(tmp_path: Path) -> None:
    """An open checkpoint keeps its space on a full disk after it is replaced."""
    checkpoint.write(tmp_path / "latest.safetensors", {"weights": {"a": torch.arange(100_000)}})
    state = checkpoint.read(tmp_path / "latest.safetensors")
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert torch.equal(state["weights"]["a"], torch.arange(100_000))


def test_the_number_of_threads_is_recorded_and_another_one_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, partition = toy_data(2)
    arguments: dict[str, Any] = {"data": data, "partition": partition, "device": "cpu"}
    train(tiny(2, rounds=1), out=tmp_path / "run", **arguments)
    file = tmp_path / "run" / "environment.json"
    environment = json.loads(file.read_text())
    assert environment["threads"] == torch.get_num_threads()
    resume(tmp_path / "run", **arguments)
    assert "the run began with" not in caplog.text
    file.write_text(json.dumps({**environment, "threads": 7}))
    resume(tmp_path / "run", **arguments)
    assert f"number of threads was 7 and is now {torch.get_num_threads()}" in caplog.text


# --- two on one directory ------------------------------------------------------------------------

HOLDER = """
import sys
from pathlib import Path
from threading import Thread
from semisfl.runs.directory import RunDirectory
directory = RunDirectory.open(Path(sys.argv[1]))
directory.lock()
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    """Its lock ends with the killed process, and half-written files are removed."""
    data, partition = toy_data(2)
    arguments: dict[str, Any] = {"data": data, "partition": partition, "device": "cpu"}
    train(tiny(2, rounds=1), out=tmp_path / "run", **arguments)
    (tmp_path / "run" / ".latest.safetensors.00c0ffee.tmp").write_bytes(b"half a checkpoint")
    holder = Forked(
        [sys.executable, "-c", HOLDER, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        before = contents(tmp_path)
        with pytest.raises(
            ValueError, match=rf"run is in use by process {holder.pid} on .*stop it"
        ):
            resume(tmp_path / "run", **arguments)
        assert contents(tmp_path) == before
    finally:
        holder.kill()
        holder.wait()
    assert not resume(tmp_path / "run", **arguments).stopped
    assert not list((tmp_path / "run").glob(".*"))


def test_a_lock_holds_on_a_full_disk_too(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "run", tiny(2)).unlock()
    first, second = RunDirectory.open(tmp_path / "run"), RunDirectory.open(tmp_path / "run")
    with largest_file(0):
        first.lock()
    with pytest.raises(ValueError, match="is in use by another process"):
        second.lock()
    first.unlock()
    second.lock()
    second.unlock()


@pytest.mark.parametrize("part", ["labelled", "validation", "clients"])
def test_an_image_has_one_place_in_a_partition(part: str) -> None:
    data, dealt = toy_data(2)
    first, second = dealt.clients
    changes: dict[str, Any] = {
        "labelled": {"labeled": np.append(dealt.labeled, dealt.labeled[3])},
        "validation": {"validation": dealt.labeled[3:4]},
        "clients": {"clients": (first, np.append(second, first[3]))},
    }
    image = first[3] if part == "clients" else dealt.labeled[3]
    with pytest.raises(ValueError, match=f"names image {image} twice; name each image once"):
        wrong = replace(dealt, **changes[part])
        config = tiny(2, data={"validation": 0.25 if part == "validation" else None})
        train(config, data=data, partition=wrong, device="cpu")


def test_labelled_images_are_of_several_classes(caplog: pytest.LogCaptureFixture) -> None:
    data, dealt = toy_data(2)
    one, two = (replace(dealt, labeled=dealt.labeled[data.labels[:8] < most]) for most in (1, 2))
    with pytest.raises(ValueError, match="two classes or more; give the server one of 'b' too"):
        train(tiny(2), data=data, partition=one, device="cpu")
    train(tiny(2), data=data, partition=two, device="cpu")
    assert "the server has no labelled image of c, d" in caplog.text


def test_labelled_images_are_there_and_have_labels() -> None:
    data, dealt = toy_data(2)
    with pytest.raises(ValueError, match="labelled images need two classes"):
        train(tiny(2), data=data, partition=replace(dealt, labeled=[]), device="cpu")
    labels = data.labels.clone()
    labels[dealt.labeled[2]] = -1
    with pytest.raises(ValueError, match=f"image {dealt.labeled[2]} .* its label is unknown"):
        train(tiny(2), data=replace(data, labels=labels), partition=dealt, device="cpu")
