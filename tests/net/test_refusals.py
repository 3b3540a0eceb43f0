"""However often an identity is refused, the log says so in few lines."""

from types import SimpleNamespace

import pytest

from semisfl.net.server import refusals
from semisfl.net.server.refusals import AUDIT_LINES, Refusals

Line = tuple[str, str, str, str]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(value=1000.0)
    clock.monotonic = lambda: clock.value
    monkeypatch.setattr(refusals, "time", clock)
    return clock


def test_many_refusals_of_an_identity_are_summed_up_and_others_are_told(
    now: SimpleNamespace,
) -> None:
    lines: list[Line] = []
    noted = Refusals(lambda *line: lines.append(line))
    for count in range(AUDIT_LINES + 5):
        noted.note(f"peer {count}", "eve", f"reason {count}")
    noted.note("peer", "ann", "another")
    assert [line[1] for line in lines] == ["eve"] * AUDIT_LINES + ["ann"]
    assert noted._timer is not None and noted._timer.daemon
    noted._timer.function()
    peer, identity, reason, by = lines[-1]
    assert (peer, identity, by) == (f"peer {AUDIT_LINES + 4}", "eve", "server")
    assert reason.startswith("5 more refused within 60 s have no line of their own")
    assert reason.endswith(f"the last: reason {AUDIT_LINES + 4}")
    noted.sum_up()
    assert len(lines) == AUDIT_LINES + 2
    noted.note("peer", "eve", "again", "device")
    assert lines[-1] == ("peer", "eve", "again", "device")


def test_few_refusals_at_a_time_all_have_their_line(now: SimpleNamespace) -> None:
    lines: list[Line] = []
    noted = Refusals(lambda *line: lines.append(line))
    for _ in range(3):
        for _ in range(AUDIT_LINES):
            noted.note("peer", "ann", "reason")
        now.value += refusals.AUDIT_SECONDS
    assert len(lines) == 3 * AUDIT_LINES and noted._timer is None
