"""The command line: results, bad input, and runs that are stopped, killed or short of disk."""

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from semisfl import __version__
from semisfl.cli.main import main
from semisfl.runs import checkpoint
from semisfl.settings import config, presets, toml
from tests import processes
from tests.net.harness import until
from tests.toy import but_for_time

ROOT = Path(__file__).parents[2]
PNG = b"\x89PNG"
SIZES = ["clients.total=3", "clients.active=2", "clients.batch=4", "server.batch=4"]
TINY = ["--set", "rounds=2", "clients.steps=2", "server.steps=2", "data.labeled=8", *SIZES]


@pytest.fixture(autouse=True)
def inside_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Write two classes of 16 x 16 pixels, with 30 training and 10 test images each."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 30), ("test", 10)):
        for label in ("dark", "light"):
            write_images(tmp_path / "images" / part / label, count, rng, bright=label == "light")
    return tmp_path / "images"


def write_images(
    folder: Path, count: int, rng: np.random.Generator, bright: bool = False, side: int = 16
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        pixels = rng.integers(0, 100, (side, side), dtype=np.uint8) + np.uint8(100 * bright)
        Image.fromarray(pixels).save(folder / f"{side}-{number}.png")


def train_arguments(images: Path, *more: str) -> list[str]:
    return ["run", "digits", *TINY, f"data.name={images}", *more]


def refused(
    capsys: pytest.CaptureFixture[str], words: list[str], pattern: str, code: int = 2
) -> None:
    capsys.readouterr()
    assert main(words) == code
    printed = capsys.readouterr()
    own = "preset images, for your own images in "
    lines = [line for line in printed.err.splitlines() if not line.startswith(own)]
    assert len(lines) == 1, printed.err
    assert re.match(rf"error: .*{pattern}", lines[0]), lines[0]
    assert not printed.out
    assert not list(Path().glob("runs/*")), "a run that cannot begin leaves nothing behind"


# --- what commands give ------------------------------------------------------------------------


def test_run_keeps_everything_in_its_directory(
    images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(train_arguments(images, "--out", "first", "--json", "--quiet")) == 0
    printed = capsys.readouterr()
    answer = json.loads(printed.out)
    assert (answer["directory"], answer["rounds"], answer["stopped"]) == ("first", 2, False)
    assert not printed.err
    names = {path.name for path in Path("first").iterdir()}
    assert names >= {"config.toml", "environment.json", "metrics.jsonl", "run.log", "partition.png"}
    assert names >= {"latest.safetensors", "best.safetensors"}
    rows = [json.loads(line) for line in Path("first/metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [0, 1]
    assert answer["accuracy"] == rows[-1]["accuracy"]
    assert answer["bytes"] == rows[-1]["bytes_total"] > 0
    assert json.loads(Path("first/environment.json").read_text())["semisfl"] == __version__


@pytest.mark.usefixtures("no_pictures")
def test_runs_get_new_directories_and_are_never_overwritten(
    images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = train_arguments(images, "method=supervised")
    assert main(words) == main(words) == 0
    first, _ = sorted(Path("runs").iterdir())
    assert first.name.startswith("digits-supervised-seed0-")
    assert f"semisfl report {first}" in capsys.readouterr().out
    before = {path: path.read_bytes() for path in first.iterdir()}
    assert main([*words, "--out", str(first)]) == 3
    assert "already holds a run" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in first.iterdir()}


@pytest.mark.usefixtures("no_pictures")
def test_a_setting_that_only_another_method_reads_is_named(
    images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misplaced setting would else change nothing in silence."""
    words = train_arguments(images, "method=supervised", "semisfl.align=client", "--quiet")
    assert main(words) == 0
    line = "warning: method supervised does not read semisfl.align\n"
    assert capsys.readouterr().err == line


def test_a_run_names_the_limit_that_ended_it_and_can_be_continued(
    images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = train_arguments(images, "stop.patience=9", "stop.hours=1e-9", "method=supervised")
    assert main([*words, "--out", "r"]) == 0
    output = capsys.readouterr().out
    again = "semisfl run --resume r --set stop.hours=none"
    assert f"ended as stop.hours = 1e-09 is met; go on beyond it with: {again}\n" in output
    assert "ended after round 1: stop.hours = 1e-09 is met (" in Path("r/run.log").read_text()
    assert main(["run", "--resume", "r", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["rounds"], answer["stopped"], answer["stopped_by"]) == (1, False, "hours")
    refused(capsys, ["run", "--resume", "r", "--set", "rounds=3"], "what can be changed is stop.ta")
    assert main([*again.split()[1:], "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["rounds"], answer["stopped_by"]) == (2, None)
    assert tomllib.loads(Path("r/config.toml").read_text())["stop"] == {"patience": 9}


def test_compare_gives_means_and_a_picture_and_reuses_runs(
    images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "--methods", "supervised,semisfl", "--seeds", "2", "--out", "table"]
    words += [*TINY, "rounds=1", f"data.name={images}", "--target", "1"]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [result["method"] for result in answer["results"]] == ["supervised", "semisfl"]
    for result in answer["results"]:
        last = [Path(run, "metrics.jsonl").read_text().splitlines()[-1] for run in result["runs"]]
        finals = [json.loads(line)["accuracy"] for line in last]
        assert result["accuracy"]["mean"] == pytest.approx(np.mean(finals))
        assert result["accuracy"]["stderr"] == pytest.approx(np.std(finals, ddof=1) / np.sqrt(2))
        assert result["to_target"]["reached"] == 2
    assert Path(answer["picture"]).read_bytes().startswith(PNG)
    assert main(words) == 0
    printed = capsys.readouterr()
    assert "4 of 4 runs are finished" in printed.err and "Supervised-only" in printed.out
    assert main(["report", "table", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    means = {result["method"]: result["accuracy"] for result in answer["results"]}
    assert {result["method"]: result["accuracy"] for result in report["results"]} == means


@pytest.mark.parametrize("name", [*presets.PRESETS, "cifar10+as_published_code"])
def test_run_accepts_the_output_of_show_as_a_file(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", name]) == 0
    text = capsys.readouterr().out
    assert config.parse(tomllib.loads(text)) == presets.preset(name)
    fields = [
        line for line in text.splitlines() if " = " in line.split("#")[0] or line.startswith("# ")
    ]
    assert len(fields) == len(config.known_keys(presets.preset(name)))
    assert all(re.search(r"# \S.*\w", line) for line in fields), "each with its explanation"
    Path("mine.toml").write_text(text)
    assert main(["show", "mine.toml", "--json", "--set", "seed=7"]) == 0
    changed = json.loads(capsys.readouterr().out)
    assert config.parse(changed) == config.parse(
        {**presets.complete(name, presets.values_of(name)), "seed": 7}
    )


def test_a_partition_is_drawn_and_counted(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["show", "digits", "--partition", "who.png", *TINY, f"data.name={images}"]
    words += ["data.validation=0.1"]
    assert main([*words, "--json"]) == 0
    held = json.loads(capsys.readouterr().out)
    assert held["server"] == {"images": 8, "classes": {"dark": 4, "light": 4}}
    assert sum(client["images"] for client in held["clients"]) == 60 - 8 - 6
    assert held["validation"] == 6 and held["unused"] == 0
    assert Path("who.png").read_bytes().startswith(PNG)
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "8 labelled images on the server; 3 clients" in printed
    assert "46 in all; 6 are for validation\n" in printed


BARE = """
import sys
for name in ("matplotlib", "grpc", "msgpack", "cryptography", "datasets", "scipy", "triton"):
    sys.modules[name] = None
from semisfl.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def on_a_bare_machine(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command without the packages that only pictures, the network and kernels need."""
    return processes.run([sys.executable, "-c", BARE, *words])


def test_a_bare_machine_trains_and_compares(images: Path) -> None:
    words = ["compare", "--methods", "semisfl", "--seeds", "1", "--out", "table", "--quiet"]
    bare = on_a_bare_machine(*words, *TINY, f"data.name={images}", "--json")
    assert bare.returncode == 0, bare.stderr
    assert json.loads(bare.stdout)["picture"] is None
    assert "matplotlib is not installed; pip install 'semisfl[plots]'" in bare.stderr
    assert not Path("table/semisfl-seed0/partition.png").exists()


def test_a_bare_machine_says_what_its_commands_need() -> None:
    refused = on_a_bare_machine("certs", "init")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "pip install 'semisfl[network]'" in refused.stderr


# --- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (["--set", "rounds"], "'rounds' is not key=value"),
        (["--set", "data.labeled=6000"], "labeled = 6000 exceeds the 5000"),
        (
            ["--set", "model.cut=20"],
            "model.cut = 20 is outside the model; it has 10 layers, use 1 to 9",
        ),
        (["--set", "model.cut=conv9"], "model.cut = 'conv9' is no layer.*conv1"),
        (["--set", "data.name=nowhere"], "'nowhere' is neither a known set .*digits.* nor a path"),
        (["mnist"], "preset 'mnist' is not known; known: digits"),
        (["--device", "tpu"], "'tpu' is not known; use auto, cpu, cuda or cuda:N"),
        (["--rounds", "3"], "[Nn]o such option.*--rounds"),
        (["--resume", "nowhere"], "nowhere holds no run"),
        (["--resume", "nowhere", "--out", "other"], "leave out PRESET and --out"),
        (["--set", "stop.target=101"], "stop.target = 101: .*less than or equal to 100"),
        (["--set", "stop.hours=0"], "stop.hours = 0: .*greater than 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_each_mistake_is_one_line(
    words: list[str], pattern: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, ["run", *words], pattern)


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (["frobnicate"], "No such command 'frobnicate'; try `semisfl --help`$"),
        (["--frob"], "[Nn]o such option.*--frob.*; try `semisfl --help`$"),
        (["show", "--frob"], "[Nn]o such option.*--frob.*; try `semisfl show --help`$"),
        (["report"], "Missing argument.*; try `semisfl report --help`$"),
        (["report", "nowhere"], "nowhere holds no run"),
        (["certs", "client"], "Missing option '--name'; try `semisfl certs client --help`$"),
        (["join"], "Missing argument 'HOST:PORT'; try `semisfl join --help`$"),
        (
            ["export", "r", "--to", "onnxx"],
            "Invalid value for '--to': 'onnxx' is not one of 'onnx',",
        ),
        (["show", "missing.toml"], "cannot read missing.toml: No such file or directory$"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_line_that_cannot_be_read(
    words: list[str], pattern: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, words, pattern)


def test_an_output_folder_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("")
    refused(
        capsys, ["run", "--out", "file/run"], "cannot write to file/run: .*; choose another --out"
    )
    refused(capsys, ["run", "--out", "file"], "file.*choose another --out")
    # /proc refuses new folders to everybody, root included.
    refused(
        capsys, ["run", "--out", "/proc/run"], "cannot write to /proc/run: .*; choose another --out"
    )


def test_a_truncated_checkpoint_is_refused_and_another_can_be_named(
    images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    every = ["--set", "runtime.checkpoint_every=1"]
    assert main(train_arguments(images, "--out", "r", *every)) == 0
    latest = Path("r/latest.safetensors")
    latest.write_bytes(latest.read_bytes()[:-100])
    metrics = Path("r/metrics.jsonl").read_text()
    error = r"latest.safetensors is damaged .*previous.safetensors"
    refused(capsys, ["run", "--resume", "r/latest.safetensors"], error)
    assert Path("r/metrics.jsonl").read_text() == metrics, "nothing is lost"
    error = "r/best.safetensors holds a model, not the state of its training"
    refused(capsys, ["run", "--resume", "r/best.safetensors"], error)
    assert main(["run", "--resume", "r/previous.safetensors", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 2
    checkpoint.read(latest)


@pytest.mark.usefixtures("no_pictures")
def test_a_run_killed_before_its_first_checkpoint_begins_again(
    images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(train_arguments(images, "--out", "r")) == 0
    latest, metrics = Path("r/latest.safetensors"), Path("r/metrics.jsonl")
    digest, rows = checkpoint.digest(checkpoint.read(latest)), rows_but_for_time(metrics)
    latest.unlink()
    capsys.readouterr()
    assert main(["run", "--resume", "r", "--json"]) == 0
    printed = capsys.readouterr()
    assert "no checkpoint yet" in printed.err
    assert json.loads(printed.out)["rounds"] == 2 and rows_but_for_time(metrics) == rows
    assert checkpoint.digest(checkpoint.read(latest)) == digest


def test_unexpected_errors_have_no_traceback_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(name: str) -> None:
        raise RuntimeError("a bug\nof ours")

    monkeypatch.setattr(presets, "values_of", fail)
    refused(capsys, ["run"], r"RuntimeError: a bug of ours \(this is unexpected; --debug", code=1)
    assert main(["run", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


# --- in processes of their own -----------------------------------------------------------------


def test_errors_and_version_as_a_shell_sees_them() -> None:
    def command(*words: str) -> "subprocess.CompletedProcess[str]":
        return processes.run([sys.executable, "-m", "semisfl", *words])

    bad = command("run", "--set", "round=3")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == "error: unknown key 'round'; did you mean 'rounds'?\n"
    assert command("--version").stdout == f"semisfl {__version__}\n"


@pytest.mark.usefixtures("no_pictures")
def test_a_full_disk_loses_no_checkpoint_and_no_metrics(
    images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A limit on file sizes refuses checkpoints as a full disk does, but not the small files."""
    words = train_arguments(images, "--out", "r")
    env = {**os.environ, "MPLBACKEND": "agg"}
    full = processes.run([sys.executable, "-m", "semisfl", *words], largest_file=100_000, env=env)
    assert full.returncode == 1
    *warnings, last = [
        line for line in full.stderr.splitlines() if "round" not in line.split(":")[1]
    ]
    assert all(line.startswith("warning: cannot write checkpoint") for line in warnings)
    assert re.match(
        r"error: the run's end could not be saved: .*latest.safetensors.*--resume r", last
    )
    assert len(Path("r/metrics.jsonl").read_text().splitlines()) == 2
    assert not list(Path("r").glob("*.safetensors")), "no half-written file"
    assert not list(Path("r").glob(".*")), "nor a temporary one"

    assert main(["run", "--resume", "r", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 2
    checkpoint.read(Path("r/latest.safetensors"))


def rows_but_for_time(path: Path) -> list[dict[str, Any]]:
    return but_for_time([json.loads(line) for line in path.read_text().splitlines()])


@pytest.mark.usefixtures("no_pictures")
def test_a_run_stopped_by_sigterm_and_resumed_is_bit_identical(
    images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = train_arguments(images, "rounds=8", "clients.steps=8", "runtime.checkpoint_every=3")
    assert main([*words, "--out", "whole", "--quiet"]) == 0
    process = processes.Forked(
        [sys.executable, "-m", "semisfl", *words, "--out", "parts"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = Path("parts/metrics.jsonl")
    try:
        until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, 120)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert "stopping after this iteration" in err
    assert "continue with: semisfl run --resume parts" in out
    done = len(rows_but_for_time(metrics))
    assert 2 <= done < 8
    assert checkpoint.read(Path("parts/latest.safetensors"))["round"] == done
    capsys.readouterr()
    assert main(["run", "--resume", "parts", "--json"]) == 0
    for name in ("latest", "best"):
        states = [checkpoint.read(Path(run, f"{name}.safetensors")) for run in ("whole", "parts")]
        assert checkpoint.digest(states[0]) == checkpoint.digest(states[1]), name
    assert rows_but_for_time(Path("whole/metrics.jsonl")) == rows_but_for_time(metrics)


@pytest.mark.parametrize("words", [["run/config.toml", "--out", "new"], ["--resume", "run"]])
def test_the_run_of_a_server_is_named_before_its_images_are_looked_for(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The images are where --labeled says; data.name is then only the preset's."""
    Path("run").mkdir()
    served = config.parse({"data": {"name": "images"}, "fleet": {"kind": "network"}})
    Path("run", "config.toml").write_text(toml.to_toml(served))
    assert main(["run", *words]) == 2
    assert "clients come to `semisfl serve`; use it" in capsys.readouterr().err
