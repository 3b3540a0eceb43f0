"""A device measures itself, and a plan believes it."""

import json
from pathlib import Path

import pytest

from reproduction.benchmarks import rounds as speed
from reproduction.benchmarks.rounds import round_operations, settings
from semisfl.cli.main import main
from semisfl.costs import clock


def test_a_measured_profile_is_one_that_plans_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(speed.client_profile("digits", "cpu"))
    (device,) = clock.load_profile(str(file)).devices
    assert device.gflops > 0 and device.memory_gb > 0.1
    plan = ["plan", "digits", "--profile", str(file), "--json", "--out", str(tmp_path / "p.png")]
    assert main(plan) == 0
    lines = json.loads(capsys.readouterr().out)["methods"]
    semisfl = next(line for line in lines if line["method"] == "semisfl")
    # Four passes of the CNN's bottom for 32 images, ten times.
    flops = 10 * 4 * 32 * 2 * (25 * 32 * 24 * 24 + 25 * 32 * 64 * 8 * 8)
    assert semisfl["computing"] == pytest.approx(flops / device.gflops / 1e9, rel=1e-3)


def test_what_a_round_computes_by_hand() -> None:
    """The digits' CNN: 20 supervised steps of 32 images, 10 steps of 5 clients with 32."""
    bottom = 2 * (25 * 32 * 24 * 24 + 25 * 32 * 64 * 8 * 8)
    top, head = 2 * (1024 * 512 + 512 * 10), 2 * (1024 * 1024 + 1024 * 128)
    labelled, rows, images = 20 * 32, 10 * 5 * 32, 5 * 600
    wanted = {
        "supervised": labelled * 3 * (bottom + top),
        "semisfl": labelled * (4 * bottom + 3 * top + 4 * head) + rows * 4 * (bottom + top + head),
        "fedswitch-sl": labelled * 3 * (bottom + top) + rows * (4 * bottom + 5 * top),
        "fedmatch": (labelled * 3 + rows * 8) * (bottom + top),
        "semifl": (labelled * 3 + rows * 6 + images) * (bottom + top),
    }
    for method, expected in wanted.items():
        operations = round_operations(settings("digits", f"method={method}"), (1, 28, 28), 10, 6000)
        assert operations == expected, method
