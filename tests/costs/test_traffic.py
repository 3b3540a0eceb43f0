"""What a plan says beforehand, by hand; that runs send as much is tested with the methods."""

import pytest

from semisfl import config
from semisfl.costs.traffic import method_costs


def test_a_plan_by_hand() -> None:
    """A round of the digits' CNN with numbers small enough to count: bottom, top, features."""
    bottom = 4 * ((5 * 5 * 1 * 32 + 32) + (5 * 5 * 32 * 64 + 64))
    whole = bottom + 4 * ((1024 * 512 + 512) + (512 * 10 + 10))
    features = 4 * 16 * 1024 * 5
    expected = {
        "semisfl": (2 * bottom + features, bottom + 2 * features),
        "supervised": (0, 0),
        "semifl": (whole, whole),
        "fedmatch": (2 * whole, whole),
        "fedswitch": (2 * whole, whole),
        "fedswitch-sl": (2 * bottom + features, bottom + 2 * features),
    }
    settings = config.parse(
        {
            "rounds": 7,
            "data": {"name": "digits"},
            "model": {"name": "cnn"},
            "clients": {"total": 9, "active": 3, "batch": 16, "steps": 5},
        }
    )
    rows = method_costs(settings, (1, 28, 28), 10, up=2.0, down=10.0)
    assert {row["method"]: (row["down_bytes"], row["up_bytes"]) for row in rows} == expected
    for row in rows:
        down, up = expected[row["method"]]
        # Mbit/s: a byte is eight bits.
        seconds = 8 * down / 10e6 + 8 * up / 2e6
        assert row["round_seconds"] == pytest.approx(seconds)
        assert row["run_hours"] == pytest.approx(7 * seconds / 3600)
        assert row["run_bytes"] == 7 * 3 * (down + up)
