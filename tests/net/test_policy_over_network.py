"""A device's policy against a server that knows of it, and against one that does not care."""

import re
from typing import Any

import pytest
import torch

from semisfl.net.client.rejection import Rejected
from semisfl.net.server import admission
from semisfl.settings.policy import DevicePolicy
from tests.net.harness import Network, audited, network, tiny, until

UPDATES: dict[str, Any] = {"update_clip": 1.0, "update_noise": 1e-3}


def ended(net: Network, client: int = 0) -> str:
    net.clients[client].join(30)
    error = net.clients[client].error
    assert isinstance(error, Rejected), error
    return str(error)


def test_terms_that_break_a_policy_end_with_a_line_on_both_sides(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with network(tiny(1)) as net:
        net.join(0, policy=DevicePolicy(codec="int8"))
        reasons = ended(net)
        assert net.fleet.present() == []
    (line,) = audited(caplog)
    for part in ("wire.student_features = 'fp32' is finer", "wire.teacher_features = 'fp32'"):
        assert part in reasons and part in line


def test_a_server_that_does_not_look_at_policies_gets_no_features(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "objections", lambda *_: [])
    with network(tiny(1)) as net:
        net.join(0, policy=DevicePolicy(codec="int8"))
        assert "this device's policy ends its part: wire.student_features" in ended(net)
        until(lambda: bool(audited(caplog)))
        assert net.fleet.roster.images == {} and net.fleet.traffic.total() == 0
    assert "the client's policy: wire.student_features" in audited(caplog)[0]


def test_a_runs_policy_holds_on_devices_that_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    with network(tiny(1, policy={"clip": 0.01, **UPDATES})) as net:
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


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (None, "sends whole models, which this device keeps; .* full_models = true in the file"),
        (
            DevicePolicy(full_models=True, clip=1.0, noise=0.1, **UPDATES),
            "policy's clip, noise, update",
        ),
        (
            DevicePolicy(full_models=True, codec="int8", uses_per_image=1),
            "codec, uses_per_image would",
        ),
    ],
)
@pytest.mark.parametrize("method", ["fedswitch", "semifl", "fedmatch", "fl2"])
def test_no_whole_model_leaves_a_device_without_its_owners_word(
    method: str, policy: DevicePolicy | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "objections", lambda *_: [])  # a server that does not care
    with network(tiny(1, method=method)) as net:
        net.join(0, policy=policy)
        assert re.search(reason, ended(net))
        assert net.fleet.roster.images == {} and net.fleet.traffic.total() == 0
