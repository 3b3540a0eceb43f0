"""The files of deploy/ name what there is: commands, options, volumes and units that systemd accepts."""

import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from PIL import Image

from semisfl.cli.main import app
from semisfl.data.dataset import Dataset
from tests import toy
from tests.net.harness import until
from tests.processes import free_port

ROOT = Path(__file__).parents[1]
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
SMALL = (
    "rounds=1 clients.batch=4 clients.steps=2 server.batch=4 server.steps=2 data.augment.cutout=4"
)


def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
    return content


def options_exist(words: list[str]) -> None:
    """Check that every option of a command line is one of its command."""
    command: Any = typer.main.get_command(app)
    known = {"--log-format"}
    for word in words:
        if word in getattr(command, "commands", {}):
            command = command.commands[word]
    known |= {name for option in command.params for name in option.opts}
    used = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert used and used <= known, (words, used - known)


def test_every_command_of_compose_has_the_options_it_uses() -> None:
    for service in compose()["services"].values():
        if service.get("entrypoint"):
            text = service["command"][0].replace("$$", "$")
            lines = re.findall(r"semisfl ((?:certs|serve|show|inspect) [^>)|\n]*)", text)
            assert lines
            for line in lines:
                options_exist(line.split())
        else:
            options_exist(service["command"])


class Composed:
    """The services of compose.yaml as plain processes, with folders for volumes and free ports."""

    def __init__(self, root: Path, semisfl: str = f"exec {sys.executable} -m semisfl") -> None:
        self._root = root
        self._services = compose()["services"]
        programs = {
            "semisfl": semisfl,
            "chown": f"touch {root / 'given'}; exit 0 #",
            # `setup` has not the capability to change the mode of files that it gave away.
            "chmod": f"test ! -e {root / 'given'} && exec {shutil.which('chmod')}",
        }
        for name, line in programs.items():
            place = root / "bin" / name
            place.parent.mkdir(exist_ok=True)
            place.write_text(f'#!/bin/sh\n{line} "$@"\n')
            place.chmod(0o755)
        self.ports = {"8443": free_port(), "9464": free_port(), "8780": free_port()}
        for volume in compose()["volumes"]:
            (root / volume).mkdir()

    def start(self, name: str, *, check: bool = False) -> subprocess.Popen[str]:
        """Start a service, or its healthcheck."""
        service = self._services[name]
        words = [*service.get("entrypoint", ["semisfl"]), *service["command"]]
        if check:
            words = service["healthcheck"]["test"][1:]
        words = [self._placed(word, service["volumes"]) for word in words]
        path = f"{self._root / 'bin'}:{os.environ['PATH']}"
        environment = os.environ | service.get("environment", {}) | {"PATH": path}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        folder = self._root / "runs"
        return subprocess.Popen(words, cwd=folder, env=environment, text=True)

    def _placed(self, word: str, volumes: list[str]) -> str:
        word = word.replace("$$", "$").replace("network.quorum=2", f"network.quorum=2 {SMALL}")
        for volume in volumes:
            source, mount = re.sub(r"\$\{\w+:-\./(\w+)\}", r"\1", volume).split(":")[:2]
            word = re.sub(rf"(?<![\w.]){mount}(?=[/\s)]|$)", str(self._root / source), word)
        word = re.sub(r"(?<![\w.])/device-", f"{self._root}/device-", word)
        word = word.replace(
            "/tmp/status.json", f"{self._root}/status-{volumes[0].partition(':')[0]}.json"
        )
        for port, free in self.ports.items():
            word = word.replace(f"server:{port}", f"localhost:{free}")
            word = word.replace(f".0:{port}", f".0:{free}").replace(f".1:{port}", f".1:{free}")
        return word


CERTIFICATES = """
case "$1 $2" in
"certs init") mkdir "$4" && cd "$4" && touch authority.crt revoked.txt;;
"certs server") cd "$4" && touch server.crt server.key;;
"certs client") test ! -e "$4/cut-off" && mkdir -p "$4/clients/$6" && touch "$4/clients/$6/client.key";;
inspect*) echo terms sha256:0123;;
esac; exit #"""
"""What `setup` needs of semisfl, without its start of seconds."""


def test_the_setup_of_compose_can_be_interrupted_and_repeated(tmp_path: Path) -> None:
    services = Composed(tmp_path, CERTIFICATES)
    files = tmp_path / "authority" / "files"
    files.mkdir()
    (files / "cut-off").touch()
    for _ in range(3):
        assert services.start("setup").wait(60) == 0
    for number in (1, 2, 3):
        device = tmp_path / f"device-{number}"
        assert (device / "accepted.txt").read_text() == "sha256:0123\n"
        assert {file.name for file in device.iterdir()} == {"accepted.txt", "client.key"}
        assert not {file.stat().st_mode & 0o077 for file in (device, *device.iterdir())} - {0}


@pytest.mark.slow
def test_the_commands_of_compose_train_as_plain_processes(tmp_path: Path) -> None:
    data = toy.dataset()
    for split, count in (("train", 24), ("test", 12)):
        for number in range(count):
            save(data, number, tmp_path / "labeled" / split / data.classes[data.labels[number]])
    for device in (1, 2, 3):
        for number in range(12 * device, 12 * device + 12):
            save(data, number, tmp_path / "devices" / str(device))
    services = Composed(tmp_path)
    for _ in range(2):  # also a second time, as at every start
        assert services.start("setup").wait(300) == 0
    server = services.start("server")
    until(lambda: services.start("server", check=True).wait(60) == 0, 120)
    page = services.start("page")
    devices = [services.start(f"device-{number}") for number in (1, 2, 3)]
    try:
        assert [device.wait(300) for device in devices] == [0, 0, 0]
        assert server.wait(60) == 0
        health = f"https://localhost:{services.ports['8780']}/healthz"
        trusted = ssl.create_default_context(cafile=tmp_path / "server" / "authority.crt")
        assert urllib.request.urlopen(health, timeout=30, context=trusted).read() == b"ok\n"
    finally:
        for process in (server, page, *devices):
            process.terminate()
            process.wait(60)
    for number in (1, 2, 3):
        status = json.loads((tmp_path / f"status-device-{number}.json").read_text())
        assert (status["state"], status["rounds"]) == ("finished", 1)
    assert "finished: 1 round done" in (tmp_path / "runs" / "first" / "run.log").read_text()


def save(data: Dataset, number: int, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pixels = data.images[number].permute(1, 2, 0).numpy()
    Image.fromarray(pixels).resize((16, 16)).save(folder / f"{number}.png")


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_units_pass_systemds_own_check(unit: Path, tmp_path: Path) -> None:
    assert [path.name for path in UNITS] == ["semisfl-client.service", "semisfl-server.service"]
    text = unit.read_text()
    for line in re.findall(
        r"semisfl ((?:serve|join) .*?)(?:; |'|$)", text.replace("\\\n", " "), re.M
    ):
        options_exist(line.split())
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed here")
    copy = tmp_path / unit.name
    copy.write_text(text.replace("/usr/local/bin/semisfl", sys.executable))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True
    )
    ours = [line for line in checked.stderr.splitlines() if "semisfl" in line]
    assert checked.returncode == 0 and not ours, checked.stderr
