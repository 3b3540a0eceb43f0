"""Memory and disk of a run are known before its first round, and compared with what is free."""

from math import prod
from pathlib import Path

import pytest

from semisfl.cli.main import main
from semisfl.costs import about_images, needs
from semisfl.costs.about_images import AboutImages
from semisfl.costs.rounds import Priced
from semisfl.runs.directory import RunDirectory
from semisfl.runs.reading import read_rounds
from semisfl.runs.start import train
from semisfl.settings.catalog import METHODS
from semisfl.settings.config import ConfigError, parse
from tests import toy
from tests.cli.test_signals import images as images

HELD = AboutImages((1, 28, 28), 10, 100.0, {0: 100, 1: 60})
SMALL = ["rounds=1", "clients.total=2", "clients.active=2", "data.labeled=8", "data.name=images"]


def needed(*, held: AboutImages = HELD, **sections: dict[str, object]) -> needs.Needs:
    return needs.needs(parse(dict(sections)), held)


def test_memory_is_that_of_plan_for_all_clients_and_the_server() -> None:
    config = parse({"clients": {"total": 4, "active": 3, "batch": 8}, "server": {"batch": 16}})
    cut = Priced.of(config, HELD).cut
    # The head: 1,024 to 1,024 to 128 without biases.
    head = 4 * (1024 * 1024 + 1024 * 128)
    # Of 3 times 8 rows: both kinds of features, their gradients, and what the top keeps.
    rows = 4 * 24 * (3 * 1024 + sum(layer.kept for layer in cut.layers[cut.index :]))
    server = cut.memory(16, 4, 1, whole=True) + 4 * head + rows
    assert needs.needs(config, HELD).memory == server + 3 * cut.memory(8, 4, 1)
    elsewhere = config.in_fleet("network")
    assert needs.needs(elsewhere, HELD).memory == server


@pytest.mark.parametrize("method", METHODS)
def test_disk_is_that_of_the_checkpoints_while_the_next_one_is_written(
    method: str, tmp_path: Path
) -> None:
    layers = toy.FLAT[0].replace("16", "256")
    # In its tenth round FedMatch chooses helpers.
    short = ["rounds=12", "server.steps=1", "clients.steps=1", "runtime.checkpoint_every=11"]
    config = toy.values(method, layers, toy.FLAT[1], *short)
    data = toy.dataset()
    partition = toy.partition(data)
    train(config, data=data, partition=partition, device="cpu", out=tmp_path / "run")
    latest, previous, best = (
        (tmp_path / "run" / f"{name}.safetensors").stat().st_size
        for name in ("latest", "previous", "best")
    )
    needed = needs.needs(config, about_images.loaded(data, partition)).disk
    assert needed == pytest.approx(2 * latest + previous + best, rel=0.1)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_the_uploads_that_fedmatch_keeps_take_the_machines_own_memory(
    on_cpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse({"method": "fedmatch", "clients": {"total": 50, "active": 5}, "rounds": 8})
    tensors = [item for layer in Priced.of(config, HELD).cut.layers for item in layer.state]
    model = sum(prod(shape) * dtype.itemsize for shape, dtype in tensors)
    wanted = needs.needs(config, HELD)
    # 40 clients have taken part after 8 rounds. Of each: its latest upload, and one that still helps.
    assert wanted.host == 40 * 2 * model
    assert needed().host == 0
    monkeypatch.setattr(needs, "_on_cpu", lambda device: on_cpu)
    least = wanted.host + on_cpu * wanted.memory
    monkeypatch.setattr(needs, "free_on", lambda device: least if on_cpu else wanted.memory)
    monkeypatch.setattr(needs, "free_memory", lambda: least)
    needs.check(config, HELD, tmp_path, "auto")
    monkeypatch.setattr(needs, "free_on", lambda device: least - 1 if on_cpu else wanted.memory)
    monkeypatch.setattr(needs, "free_memory", lambda: least - 1)
    with pytest.raises(ConfigError, match="memory"):
        needs.check(config, HELD, tmp_path, "auto")


def test_a_batch_counts_up_to_the_images_of_a_client() -> None:
    assert needed(clients={"batch": 999_999}) == needed(clients={"batch": 100})
    assert needed(clients={"batch": 100}).memory > needed(clients={"batch": 99}).memory


@pytest.mark.usefixtures("images")
def test_a_run_that_does_not_fit_is_refused_before_its_directory_exists(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "--out", "run", "--quiet", "--device", "cpu", "--set", *SMALL]
    monkeypatch.setattr(needs, "free_on", lambda device: 1_000_000)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "of memory and 1 MB are free; lower clients.batch = 32" in error
    monkeypatch.setattr(needs, "free_on", lambda device: None)
    monkeypatch.setattr(needs, "_free_disk", lambda place: 1000)
    assert main(words) == 2
    assert "the checkpoints of this run need" in capsys.readouterr().err
    assert not Path("run").exists()


@pytest.mark.usefixtures("images")
def test_a_server_that_does_not_fit_is_refused_before_it_listens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["serve", "digits", "--labeled", "images", "--out", "run", "--insecure-loopback"]
    words += ["--listen", "127.0.0.1:0", "--device", "cpu"]
    monkeypatch.setattr(needs, "free_on", lambda device: 1_000_000)
    assert main(words) == 2
    assert "of memory and 1 MB are free; lower clients.batch = 32" in capsys.readouterr().err
    assert not Path("run").exists()


@pytest.mark.usefixtures("images")
@pytest.mark.parametrize("method", ["semisfl", "fedswitch"])
def test_a_batch_is_capped_at_the_images_of_a_client_and_the_run_keeps_the_users_own(
    method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--set", *SMALL, "server.steps=2", "clients.steps=2", f"method={method}"]
    sent = []
    for batch, capped in ((999_999, True), (28, False)):
        out = f"run-{batch}"
        run = ["run", "digits", "--out", out, "--device", "cpu", *words, f"clients.batch={batch}"]
        assert main(run) == 0
        warning = "clients.batch = 999999 is more than any client holds: batches have 28 images"
        assert capsys.readouterr().err.count(warning) == capped
        directory = RunDirectory.open(Path(out))
        assert directory.config().clients.batch == batch
        sent.append(read_rounds(directory.path, dict)[-1]["bytes_total"])
    assert sent[0] == sent[1]
    assert main(["run", "--resume", "run-999999", "--quiet"]) == 0


@pytest.mark.usefixtures("images")
def test_a_diverged_run_has_an_exit_code_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--out", "run", "--quiet", "--device", "cpu", "--set", *SMALL]
    assert main([*words, "method=supervised", "server.steps=2", "optimizer.lr=1e30"]) == 4
    assert "error: the run diverged" in capsys.readouterr().err


def test_memory_and_disk_that_are_free_are_known_here(tmp_path: Path) -> None:
    memory = needs.free_on("cpu")
    assert memory is None or memory > 1_000_000
    assert (needs._free_disk(tmp_path / "not" / "there") or 0) > 1000
    assert needs._free_disk(Path("/proc/run")) is None, "it has no size, and cannot be written to"


def test_the_free_memory_is_that_of_the_gpu_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {None: 10, "cuda:1": 20}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device=None: (free[device], 99))
    assert (needs.free_on("auto"), needs.free_on("cuda:1")) == (10, 20)
