"""Test what one server carries: the code, the command and the docs have the measured numbers."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from semisfl.cli.main import main
from semisfl.costs import server_size
from semisfl.costs.server_size import Work, size_server
from semisfl.settings.counts import amount

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "sizing.md").read_text(encoding="utf-8")
MIB = 2**20


def measured(file: str, **wanted: Any) -> dict[str, Any]:
    (entry,) = (
        one
        for one in json.loads((ROOT / "results" / "cpu" / file).read_text())
        if wanted.items() <= one.items()
    )
    return entry


def test_constants_are_those_of_the_benchmarks() -> None:
    idle = measured("network.json", benchmark="network_idle", clients=5000)
    step = measured("network.json", machine="two Arm Neoverse-N1 cores")
    crowd = measured("training_clients.json", active=1000)
    grown = crowd["server_megabytes_peak"] - crowd["server_megabytes_connected"]
    for constant, value in (
        (server_size.ALONE, crowd["server_megabytes_alone"] * MIB),
        (server_size.CONNECTED, idle["server_kilobytes_a_client"] * 1024),
        (server_size.ACTIVE, grown * MIB / 1000),
        (server_size.STEP_SECONDS, crowd["server_cpu_seconds_a_round"] / 1000 / 4),
        (server_size.BYTE_SECONDS, step["fleet_server_cpu_ms"] / 1000 / 10 / (3 * MIB)),
        (server_size.RETURN_SECONDS, idle["seconds_until_all_are_back"] / 5000),
    ):
        assert constant == pytest.approx(value)


def test_the_table_of_the_docs_is_computed_from_them() -> None:
    size = size_server(20_000, 200, Work(steps=4, up=0, down=0, held=0, seconds=1.0))
    cpu = f"{1000 * size.cpu_per_device:.1f} ms | {size.server_seconds:.1f} s"
    for line in (
        f"without devices | {amount(server_size.ALONE)} |",
        f"connected device | {amount(server_size.CONNECTED)} | {amount(size.memory_connected)}",
        f"after a restart | {5000 * server_size.RETURN_SECONDS:.0f} s for 5,000 | {size.back_seconds:.0f} s",
        f"round of 4 steps | {cpu} |",
        f"in a round | {amount(server_size.ACTIVE)} | {amount(size.memory_active)} |",
    ):
        assert line in PAGE, line


def test_pages_have_the_benchmarks_memory_in_one_unit() -> None:
    """The file has MiB. This page has 320 MB for its 305.1, and the table must not call them MB."""
    crowd = measured("training_clients.json", active=1000)
    both = (crowd[f"server_megabytes_{when}"] * MIB / 1e6 for when in ("connected", "peak"))
    line = "{:,.0f} MB, {:,.0f} MB".format(*both)
    assert line in (ROOT / "docs" / "performance-cpu.md").read_text(encoding="utf-8")


def test_the_command_of_the_docs_prints_what_stands_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command, _, printed = PAGE.partition("$ semisfl ")[2].partition("```")[0].partition("\n")
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == printed
    assert main([*shlex.split(command), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["devices"], values["active"], values["method"]) == (20_000, 200, "semisfl")
    assert values["most_active"] == pytest.approx(
        values["device_seconds"] / values["cpu_per_device"]
    )


def test_a_server_by_hand() -> None:
    # 8 steps of 4.8675 ms are 38.94 ms; 10^8 bytes at 2.381 ns are 238.1 ms, which is more.
    small = Work(steps=8, up=10, down=10, held=10, seconds=2.0)
    size = size_server(100, 100, small)
    assert size.server_seconds == pytest.approx(3.894) == size.round_seconds
    assert size.most_active == pytest.approx(51.36, abs=0.01), "the devices wait for the server"
    large = Work(steps=8, up=6 * 10**7, down=4 * 10**7, held=5 * 10**6, seconds=60.0)
    size = size_server(100, 100, large)
    assert size.server_seconds == pytest.approx(23.81, abs=0.01) and size.round_seconds == 60
    assert size.up == pytest.approx(8e8) and size.down == pytest.approx(16e8 / 3)
    assert size.memory_active == 5e8 and size.memory == pytest.approx(
        server_size.ALONE + 100 * server_size.CONNECTED + 5e8
    )


def test_wrong_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, error in (
        (["--active", "5"], "--active 5 needs --devices"),
        (["--devices", "5", "--active", "9"], "clients.active = 9 exceeds clients.total = 5"),
        (["--devices", "5", "--set", "clients.active=2", "method=supervised"], "asks nothing of"),
        (["--devices", "1000000000000"], "should be less than or equal to 1000000"),
    ):
        assert main(["plan", "digits", *words]) == 2
        assert error in capsys.readouterr().err
