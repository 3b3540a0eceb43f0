"""Train with a server and four devices on this machine, over mutual TLS, each a process of its own.

``python examples/demo_network.py [FOLDER [KEY=VALUE...]]`` writes the embedded digits as image files into a new folder, makes
certificates, starts `semisfl serve`, and joins the four devices with `semisfl join`. docs/deploy.md does the same on
real machines.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

import semisfl
from semisfl.net.tls import certs

DEVICES = 4
SETTINGS = [f"clients.total={DEVICES}", f"clients.active={DEVICES}", "network.quorum=3", "rounds=8"]


def command(*words: str | Path) -> list[str]:
    """Return the words that start a command of semisfl in a process."""
    return [sys.executable, "-m", "semisfl", *map(str, words)]


def write_images(place: Path) -> None:
    """Write the digits as files: a few with labels for the server, the others for the devices."""
    config = semisfl.preset("digits")
    data = semisfl.load_data("digits")
    partition = semisfl.divide(config, data)

    def write(pixels: object, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file)

    for number in partition.labeled:
        label = data.classes[data.labels[number]]
        write(data.images[number, 0].numpy(), place / "labeled/train" / label / f"{number}.png")
    for number, label in enumerate(data.test_labels):
        file = place / "labeled/test" / data.classes[label] / f"{number}.png"
        write(data.test_images[number, 0].numpy(), file)
    unlabelled = np.concatenate(partition.clients)
    for device in range(DEVICES):
        for number in unlabelled[device::DEVICES]:
            write(data.images[number, 0].numpy(), place / f"device-{device}" / f"{number}.png")


def make_certificates(place: Path) -> None:
    """Make an authority, the server's certificate and one for each device, as `semisfl certs` does."""
    certs.make_authority(place)
    certs.make_server(place, ["localhost"])
    for device in range(DEVICES):
        certs.make_client(place, f"device-{device}")


def train(place: Path, settings: list[str]) -> int:
    """Run the server and the devices until the end; return the server's exit code."""
    # Five processes on one machine: with more threads than cores each would wait for the others.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        command(
            *("serve", "digits", "--labeled", place / "labeled", "--certs", place / "certs"),
            *("--listen", "127.0.0.1:0", "--out", place / "run", "--set", *SETTINGS, *settings),
        ),
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert server.stderr is not None
    devices: list[subprocess.Popen[str]] = []
    digest = ""
    try:
        for line in server.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            if found := re.search(r"--accept (\S+)", line):
                digest = found[1]
            if found := re.search(r"listening on port (\d+)", line):
                for name in (f"device-{device}" for device in range(DEVICES)):
                    words = ["--data", place / name, "--certs", place / "certs/clients" / name]
                    join = command("join", f"localhost:{found[1]}", *words, "--accept", digest)
                    devices.append(subprocess.Popen(join, env=environment))
        return server.wait()
    finally:
        server.terminate()
        for device in devices:
            device.terminate()
        for process in (server, *devices):
            process.wait()


if __name__ == "__main__":
    folder = Path(sys.argv[1] if sys.argv[1:] else tempfile.mkdtemp(prefix="demo-network-"))
    folder.mkdir(parents=True, exist_ok=True)
    write_images(folder)
    make_certificates(folder / "certs")
    code = train(folder, sys.argv[2:])
    print(f"the server's run is in {folder / 'run'}; no image left its device's folder")
    sys.exit(code)
