"""A device's policy against a server that knows of it, and against one that does not care."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from semisfl.config import ConfigError
from semisfl.fleet.base import RoundAborted
from semisfl.net.client.allowance import Allowance, beside
from semisfl.net.client.connection import Rejected
from semisfl.net.server import admission
from semisfl.policy import Policy
from tests.net.harness import Network, network, tiny, until


def lines(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == name]


def ended(net: Network, client: int = 0) -> str:
    net.clients[client].join(10)
    error = net.clients[client].error
    assert isinstance(error, Rejected), error
    return str(error)


def test_caps_that_cannot_be_written_down_are_said_before_anything_is_sent(tmp_path: Path) -> None:
    allowance = Allowance(tmp_path / "not there" / "policy.spent.json")
    with pytest.raises(ValueError, match=r"policy\.spent\.json cannot be written \(No such file"):
        allowance.check_writable()
    file = tmp_path / "policy.spent.json"
    Allowance(file).check_writable()
    assert Allowance(file).spent.rounds == 0


def test_terms_that_break_a_policy_end_with_a_line_on_both_sides(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with network(tiny(1)) as net:
        net.join(0, policy=Policy(codec="int8", layers="fc1"))
        said = ended(net)
        assert net.fleet.present() == []
    (line,) = lines(caplog, "semisfl.audit")
    for part in ("wire.student_features = 'fp32' is finer", "wants layers = 'fc1'"):
        assert part in said and part in line


def test_a_server_that_does_not_look_at_policies_gets_no_features(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "objections", lambda *_: [])
    with network(tiny(1)) as net:
        net.join(0, policy=Policy(codec="int8"))
        assert "this device's policy ends its part: wire.student_features" in ended(net)
        until(lambda: bool(lines(caplog, "semisfl.audit")))
        assert net.fleet.roster.images == {} and net.fleet.traffic.total() == 0
    assert "the client's policy: wire.student_features" in lines(caplog, "semisfl.audit")[0]


def test_a_policy_that_fits_takes_part_and_the_server_says_what_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "semisfl")
    config = tiny(2, wire={"student_features": "int8", "teacher_features": "int8"})
    with network(config) as net:
        net.join_all(policy=Policy(codec="int8", layers="flatten", noise=0.1, rounds=1))
        net.experiment.method.round(0)
    said = "\n".join(lines(caplog, "semisfl.net.server.listener"))
    assert "codec = int8, layers = flatten, noise = 0.1, rounds = 1" in said
    assert "takes part in 1 rounds at most, the run has 2" in said


def test_a_runs_policy_holds_on_devices_that_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    with network(tiny(1, policy={"clip": 0.01})) as net:
        net.join_all()
        honest = net.fleet.forward

        def forward() -> Any:
            features = honest()
            seen.append(features.student.detach().norm(dim=1))
            return features

        monkeypatch.setattr(net.fleet, "forward", forward)
        net.experiment.method.round(0)
    assert len(seen) == 2
    for norms in seen:
        assert torch.allclose(norms, torch.tensor(0.01), rtol=1e-4)


def test_caps_end_a_devices_part_and_outlast_its_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = beside(tmp_path / "policy.toml")
    with network(tiny(1, rounds=3)) as net:
        for _ in range(2):  # the second time as a new process, which must remember the first
            client = net.join(0, policy=Policy(rounds=1))
            client.device._allowance = Allowance(file)
            assert net.fleet.wait_for(1, 10)
            if not client.device._allowance.spent.rounds:
                net.experiment.method.round(0)
                client.device.stop()
                client.join(10)
                until(lambda: not net.fleet.present())
        with pytest.raises(RoundAborted):
            net.experiment.method.round(1)
        assert "round 2 of this client would exceed the policy's rounds = 1" in ended(net)
    assert file.name == "policy.spent.json" and Allowance(file).spent.rounds == 1
    assert "would exceed the policy's rounds = 1" in lines(caplog, "semisfl.audit")[-1]
    file.write_text("{}")
    with pytest.raises(ConfigError, match=r"policy.spent.json cannot be read"):
        Allowance(file)
