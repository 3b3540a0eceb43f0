"""Every command of docs/tutorial.md, in its order; each machine is a folder.

The photographs are made here. `make test` makes everything small; `make test-slow` has the stated sizes.
"""

import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from semisfl.cli.main import main
from semisfl.settings import config
from semisfl.settings.toml import to_toml
from tests.processes import Forked

TUTORIAL = (Path(__file__).parent.parent / "docs" / "tutorial.md").read_text(encoding="utf-8")
LASTING = ("serve", "join", "watch")
"""Commands that go on until they are done or stopped: processes of their own."""
SMALL = ["data.size=32", "data.labeled=9", "rounds=2", "clients.batch=4", "clients.steps=2"]
SMALL += ["server.batch=4", "server.steps=2", "model.projection=8", "data.augment.cutout=8"]
KINDS = ("dress", "hat", "t-shirt")
SECONDS = 600
PHOTOGRAPHS, PREDICTIONS = re.findall(r"```python\n(.*?)```", TUTORIAL, re.DOTALL)


def commands() -> list[tuple[str, list[str]]]:
    """Return the machine and the words of every command of the tutorial."""
    steps = []
    for machine, lines in re.findall(r"```sh\n# on (?:the )?(\S+)\n(.*?)```", TUTORIAL, re.DOTALL):
        steps += [(machine, shlex.split(line)[1:]) for line in lines.strip().splitlines()]
    return steps


def take_photographs(place: Path, many: int) -> None:
    """Write photographs with the folders of the tutorial's repository: a colour and a pattern for each kind."""
    rng = np.random.default_rng(0)
    for kind, name in enumerate(KINDS):
        colour, stripes = 40 + 50 * np.eye(3)[kind], 60 * (np.arange(72) // (2 + 3 * kind) % 2)
        for part, count in (("train", many), ("test", 4), ("validation", 1)):
            (place / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = colour + stripes[:, None, None] + rng.normal(0, 20, (72, 96, 3))
                picture = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
                picture.save(place / part / name / f"{number:03}.jpg")


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many: int) -> Path:
    (tmp_path / "server").mkdir()
    monkeypatch.chdir(tmp_path / "server")
    take_photographs(Path("clothing-dataset-small"), many)
    exec(compile(PHOTOGRAPHS, "tutorial.md", "exec"), {})
    for phone in ("phone-1", "phone-2"):
        shutil.copytree(Path("photos/clients") / phone, tmp_path / phone / "pictures")
    return tmp_path


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("localhost", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@contextmanager
def processes() -> Iterator[dict[str, subprocess.Popen[str]]]:
    running: dict[str, subprocess.Popen[str]] = {}
    try:
        yield running
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def start(words: list[str], machine: Path) -> subprocess.Popen[str]:
    return Forked(
        [sys.executable, "-m", "semisfl", *words],
        cwd=machine,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_line(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    lines = []
    while text not in (line := process.stderr.readline()):
        lines.append(line)
        assert line, (process.wait(), lines)


def wait_for_page(address: str) -> str:
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"http://{address}/", timeout=5) as page:
                return str(page.read().decode())
        except OSError:
            assert time.monotonic() < deadline, f"no page at {address}"
            time.sleep(0.2)


def carry(machines: Path) -> None:
    """Copy the devices' certificates to them, as the tutorial asks its readers to."""
    for made in (machines / "server" / "certs" / "clients").glob("*"):
        shutil.copytree(made, machines / made.name / made.name, dirs_exist_ok=True)


@pytest.mark.parametrize(
    ("changes", "many"),
    [(SMALL, 25), pytest.param([], 100, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])],
    ids=["small", "as stated"],
)
def test_every_command_works_in_its_order(
    changes: list[str],
    machines: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ports = free_ports(3)
    names = {"train.example.org": "localhost", "0.0.0.0": "localhost"}
    names |= {f":{port}": f":{free}" for port, free in zip((8443, 8444, 8780), ports, strict=True)}
    done: list[str] = []
    digest = ""
    with processes() as running:
        for machine, words in commands():
            for name, here in names.items():
                words = [word.replace(name, here) for word in words]
            words = [digest if word == "DIGEST" else word for word in words]
            carry(machines)
            monkeypatch.chdir(machines / machine)
            if words[0] in LASTING:
                running[f"{words[0]} {machine}"] = process = start(words, machines / machine)
                if words[0].startswith("serve"):
                    wait_for_line(process, "listening on port")
                elif words[0] == "watch":
                    assert "<html" in wait_for_page(words[words.index("--listen") + 1])
                    process.send_signal(signal.SIGINT)
                    process.wait(SECONDS)
                    ended = [name for name in running if not name.startswith("watch")]
                    codes = {name: running[name].wait(SECONDS) for name in ended}
                    assert set(codes.values()) == {0}, codes
                done.append(words[0])
                continue
            command, _, target = " ".join(words).partition(" > ")
            assert main(words[: words.index(">")] if target else words) == 0, command
            printed = capsys.readouterr().out
            if target:
                Path(target).write_text(printed, encoding="utf-8")
                small = config.parse(config.override(config.read(Path(target)), changes))
                Path(target).write_text(to_toml(small), encoding="utf-8")
            if words[0] == "inspect":
                digest, *_ = re.findall(r"sha256:\w+", printed)  # then that of the weights
            if words[0] == "predict":
                exec(compile(PREDICTIONS, "tutorial.md", "exec"), {})
                assert re.search(rf"\['({'|'.join(KINDS)})'", capsys.readouterr().out)
            if words[0] == "classify":
                pictures = len(list(Path("pictures").iterdir()))
                assert len(printed.splitlines()) == 1 + pictures, "a heading and every picture"
            done.append(words[0])
    expected = "show plan compare report certs serve inspect join watch evaluate predict export"
    assert {*expected.split(), "classify"} <= set(done)
    left = machines / "server"
    for file in ("who.png", "plan.png", "served.html", "confusion.png"):
        assert (left / file).stat().st_size > 1000, file
    assert (left / "runs" / "simulated" / "compare.png").is_file()
    for file in ("whole.onnx", "bottom.safetensors", "MODEL_CARD.md"):
        assert (left / "exported" / file).is_file(), file
