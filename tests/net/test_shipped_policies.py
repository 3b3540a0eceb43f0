"""The shipped policies through the real `join` command over TLS."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from semisfl.fleet.base import RoundAborted
from semisfl.fleet.caps import Held, Price
from semisfl.runs.loop import run_rounds
from semisfl.settings.policy import read_policy
from tests.net.harness import certificates, network, tiny
from tests.net.rogue_server import folder_of_images
from tests.processes import Forked

POLICIES = Path(__file__).parents[2] / "policies"
IMAGES, STEPS = 12, 8
POLICY = 6
"""Exit status of a device whose policy ends its part (docs/deploy.md)."""


def test_a_strict_device_beside_open_ones_is_not_shut_out() -> None:
    """Its noise is far larger than their features, which no fault of its own explains."""
    strict = read_policy(POLICIES / "strict.toml").of_device()
    with network(tiny(3, rounds=2, robust={"aggregate": "clipped_mean"})) as net:
        net.enrol(0, policy=strict)
        net.enrol(1)
        net.enrol(2)
        run_rounds(net.experiment)
        assert not net.strikes
        assert net.fleet.device_log.events["left_out"] == 0


def test_strict_takes_part_spends_bits_and_ends_by_its_cap(tmp_path: Path) -> None:
    authority = certificates(tmp_path / "certs", 1)
    policy = Path(shutil.copy(POLICIES / "strict.toml", tmp_path))
    strict = read_policy(policy).of_device()
    config = tiny(1, rounds=9, clients={"batch": 4, "steps": STEPS})
    with network(config, certificates=authority) as net:
        join = [sys.executable, "-m", "semisfl", "join", net.address, "--device", "cpu"]
        join += ["--data", str(folder_of_images(tmp_path / "images", IMAGES))]
        join += ["--certs", str(authority / "clients" / "client-0"), "--policy", str(policy)]
        join += ["--accept", net.fleet.terms.digest, "--status", str(tmp_path / "status.json")]
        device = Forked(join, stderr=subprocess.PIPE, text=True)
        try:
            net.wait_for(1)
            held = Held.of(net.experiment.method.student, 4, IMAGES)  # type: ignore[attr-defined]
            each = Price.of_split(strict, STEPS, held).bits / IMAGES
            assert strict.bits_per_image is not None
            rounds = int(strict.bits_per_image // each)
            assert 2 <= rounds < 9, each
            for number in range(rounds):
                net.experiment.method.round(number)
            with pytest.raises(RoundAborted):
                net.experiment.method.round(rounds)
            _, errors = device.communicate(timeout=60)
        finally:
            device.kill()
            device.wait()
    assert device.returncode == POLICY, errors
    last = errors.strip().splitlines()[-1]
    assert "bits per image, the policy has bits_per_image = 1000" in last, last
    assert f"{rounds} rounds with {IMAGES} images" in last
    spent = json.loads((tmp_path / "strict.spent.json").read_text())
    assert spent["rounds"] == rounds and spent["bits"] == pytest.approx(rounds * each * IMAGES)
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["bits_per_image"] == pytest.approx(rounds * each, abs=0.1)
