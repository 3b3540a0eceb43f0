"""The virtual clock against real rounds on loopback behind slow links: minutes, so among the slow ones."""

import pytest

from reproduction.benchmarks import virtual_clock


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", ["semisfl", "fedswitch"])
def test_virtual_seconds_are_real_ones_within_a_tenth(method: str) -> None:
    rounds = virtual_clock.measure([method], rounds=3)["rounds"]
    assert len(rounds) == 2
    for row in rounds:
        assert row["measured"] > 10, "bytes are most of it"
        assert abs(row["error"]) < 0.1, row
