"""Test a device's last line, its status file and its exit code."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from semisfl.cli.main import main
from semisfl.net.tls import certs
from semisfl.runs.loop import run_rounds
from semisfl.settings.counts import amount
from tests.cli.test_cli import write_images
from tests.net.harness import Network, certificates, network, tiny


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    write_images(folder, 6, np.random.default_rng(0))
    (folder / "broken.png").write_bytes(b"no image")
    return folder


def join(net: Network, images: Path, *more: str, name: str = "client-0") -> int:
    return main(
        ["join", net.address, "--data", str(images), "--device", "cpu", *more]
        + ["--accept", net.fleet.terms.digest]
        + (["--insecure-loopback", "--name", name] if net.certificates is None else [])
    )


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_a_device_says_what_it_did(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = tmp_path / "status.json"
    with network(tiny(1)) as net:

        def serve() -> None:
            run_rounds(net.experiment)
            net.fleet.close(finished=True)

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        assert join(net, images, "--status", str(status)) == 0
        server.join(20)
        ((received, sent),) = net.fleet.traffic.by_client().values()
    report = json.loads(status.read_text())
    assert (report["state"], report["rounds"], report["images"]) == ("finished", 2, 6)
    assert report["unreadable"] == 1 and "reason" not in report
    assert report["bits_per_image"] is None  # no noise
    # With the terms, headers and heartbeats.
    assert received < report["bytes_sent"] < 1.02 * received
    assert sent < report["bytes_received"] < 1.02 * sent
    errors = capsys.readouterr().err
    line = errors.strip().splitlines()[-1]
    assert line == (
        "the run is finished; 2 rounds with 6 images, no bound on bits per image, "
        f"{amount(report['bytes_sent'])} sent, {amount(report['bytes_received'])} received"
    )


def test_an_empty_folder_is_an_error_before_connecting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "images").mkdir()
    with network(tiny(1)) as net:
        assert join(net, tmp_path / "images") == 2
        assert not net.fleet.device_log.events
    assert "images holds no images (" in capsys.readouterr().err


def test_every_reason_has_its_exit_code(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, policy = tmp_path / "status.json", tmp_path / "policy.toml"
    policy.write_text('codec = "int8"\n')
    with network(tiny(1)) as net:
        assert join(net, images, "--status", str(status), name="stranger") == 4
        assert "error: 127.0.0.1:" in (line := last_line(capsys)) and "places are taken" in line
        assert " rounds with " not in line, "nothing was received"
        assert json.loads(status.read_text())["state"] == "refused"
        assert "places are taken" in json.loads(status.read_text())["reason"]
        assert join(net, images, "--policy", str(policy)) == 6
        assert "the client's policy: " in last_line(capsys)
    place = certificates(tmp_path / "authority", 1)
    certs.revoke(place, "client-0")
    own = str(place / "clients" / "client-0")
    with network(tiny(1), certificates=place) as net:
        assert join(net, images, "--certs", own) == 5
        assert "the certificate of client-0 is revoked" in last_line(capsys)
        assert main(["inspect", net.address, "--certs", own]) == 5
    assert "the certificate of client-0 is revoked" in last_line(capsys)


def test_no_client_may_choose_its_servers_exit_code(images: Path) -> None:
    """A name that ends like the reason for a revocation is no revocation."""
    with network(tiny(1)) as net:
        assert join(net, images, name="is revoked") == 4
