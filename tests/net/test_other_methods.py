"""Methods of other packages over a network: where they are installed or allowed, and nowhere else."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from semisfl.net.client.rejection import Rejected
from semisfl.net.frames import WireError
from semisfl.net.terms import Terms
from semisfl.runs.experiment import assemble
from semisfl.runs.loop import run_rounds
from semisfl.settings.config import Config
from tests.net.harness import SIDE, audited, network, tiny, toy_data, until
from tests.packages import EXAMPLE, PLACE, SOFT, imported_anew, written_in_the_documentation


@pytest.fixture(autouse=True)
def reachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    written_in_the_documentation(tmp_path, "soft")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(EXAMPLE))
    with imported_anew("fedavg_fixmatch", "mypackage"):
        yield


def settings(method: str) -> Config:
    own = {"fixmatch": {"confidence_threshold": 0.2}} if method == PLACE else {}
    return tiny(2, method=method, **own)


@pytest.mark.parametrize("method", [PLACE, SOFT])
def test_it_runs_as_in_one_process(method: str) -> None:
    config = settings(method)
    data, partition = toy_data(2)
    local = assemble(config, data, partition, device="cpu")
    expected = run_rounds(local)
    with network(config) as net:
        net.join_all(allow_methods=[method])
        got = run_rounds(net.experiment)
        assert net.fleet.traffic.counts == local.fleet.traffic.counts
        for ours, theirs in zip(got.rounds, expected.rounds, strict=True):
            assert ours["loss_semi"] == pytest.approx(theirs["loss_semi"], rel=1e-5)
        assert {client.error for client in net.clients.values()} == {None}
        # A device counts its round after the last byte of it has left.
        until(lambda: [client.device.rounds for client in net.clients.values()] == [2, 2])


def test_a_device_without_it_is_refused_and_both_sides_say_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with network(settings(PLACE)) as net:
        client = net.join(0)
        until(lambda: client.error is not None)
        assert isinstance(client.error, Rejected)
        reason = f"the client does not have method '{PLACE}'; install its package on that device"
        allow = f", and let it join with --allow-method {PLACE}"
        assert reason + allow in str(client.error)
        assert any(reason in line for line in audited(caplog))


def test_no_server_chooses_what_a_device_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trap.py").write_text("class Trap: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    plain = json.loads(Terms(tiny(2), (1, SIDE, SIDE), 4, (0.5,), (0.5,)).to_json())
    plain["config"]["method"] = "trap:Trap"
    with pytest.raises(WireError, match="'trap:Trap' is neither installed here nor allowed"):
        Terms.from_json(json.dumps(plain), ["semisfl"])
    assert "trap" not in sys.modules
    with imported_anew("trap"):
        assert Terms.from_json(json.dumps(plain), ["trap:Trap"]).config.method == "trap:Trap"
        assert "trap" in sys.modules, "else the lines above prove nothing"
