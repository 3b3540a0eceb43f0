"""Everything at once, to real processes: the run finishes, with exactly the weights it must have."""

from pathlib import Path

import pytest

from tests.net.chaos import TO_CLIENTS, TO_SERVER, chaos, schedule


def assert_survived(place: Path, seed: int, seconds: float) -> None:
    report, faults = chaos(place, seed, seconds)
    assert not faults, (report, faults)
    assert report["faults"].keys() == {*TO_CLIENTS, *TO_SERVER}
    assert report["servers_started"] > 2 and report["left_out"] > 0


def test_a_seed_repeats_what_happens() -> None:
    assert schedule(3, 60, 4) == schedule(3, 60, 4) != schedule(4, 60, 4)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_some_seconds_of_chaos(tmp_path: Path) -> None:
    assert_survived(tmp_path, seed=1, seconds=15)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [2, 3])
def test_a_minute_of_chaos(tmp_path: Path, seed: int) -> None:
    assert_survived(tmp_path, seed, seconds=60)
