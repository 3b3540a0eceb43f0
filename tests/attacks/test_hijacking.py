"""Malicious servers that send valid frames, against our own client over our own protocol."""

from typing import Any

import pytest
import torch

from benchmarks.malicious_server import Hijacker, Public, hijack, plant
from semisfl.attacks.likeness import likeness
from semisfl.data.augment import Augmentation
from semisfl.data.partition import Partition
from semisfl.data.sources import load
from semisfl.fleet.base import RoundAborted, SplitRound
from semisfl.methods.semisfl import SemiSFL
from semisfl.net.client.gradient_checks import LIMIT, WINDOW, HijackDetector, alignment
from semisfl.net.client.rejection import Rejected
from semisfl.settings.policy import DevicePolicy
from tests.net.harness import Network, audited, tiny

LAYERS = [
    {"kind": "conv", "channels": 8, "kernel": 5, "stride": 2},
    *({"kind": "relu"}, {"kind": "flatten"}, {"kind": "linear"}),
]
AS_THEY_ARE = Augmentation(flip=False, pad=0, num_ops=0, cutout=0)


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(Augmentation, "of", lambda _: AS_THEY_ARE)
    data = load("digits")
    shard = torch.arange(100, 148).numpy()
    config = tiny(
        1,
        data={"labeled": 8},
        model={"layers": LAYERS, "projector": "linear"},
        clients={"batch": 16, "steps": WINDOW + 4, "total": 1, "active": 1},
    )
    net = Network(config, data, Partition(torch.arange(8).numpy(), (shard,)))
    yield net
    net.close()


def public_of(net: Network) -> Public:
    normalizer = net.experiment.normalizer
    scale, offset = normalizer.scale.view(-1, 1, 1), normalizer.offset.view(-1, 1, 1)
    pixels = net.data.test_images[:500].float() / 255
    return Public(pixels, lambda x: x * 255 * scale + offset, torch.Generator().manual_seed(0))


def method_of(net: Network) -> SemiSFL:
    assert isinstance(net.experiment.method, SemiSFL)
    return net.experiment.method


def test_a_planted_bottom_leaks_from_the_first_step_on(digits: Network) -> None:
    """Devices accept any bottom, so this attack needs no gradients."""
    digits.join_all()
    student, public = method_of(digits).student, public_of(digits)
    torch.manual_seed(0)
    state, decoder = plant(student.bottom, student.features, public, lambda x: x, 150, 32)
    digits.fleet.start_round(SplitRound(0, (0,), WINDOW + 4, 0.02, state, state))
    features = digits.fleet.forward()
    with torch.no_grad():
        rebuilt = decoder(features.teacher)
    held = digits.data.images[100:148].float() / 255
    # Which image is in which row follows from the run's seed, which the server knows.
    nearest = torch.cdist(rebuilt.flatten(1), held.flatten(1)).argmin(1)
    scores = likeness(rebuilt, held[nearest])
    mean = public.pixels.mean(0, keepdim=True).expand_as(rebuilt)
    assert scores["ssim"] > likeness(mean, held[nearest])["ssim"] + 0.3
    assert len(nearest.unique()) > 10  # told apart, not one image for all


def hijacked(net: Network, policy: DevicePolicy) -> int:
    """Return how many steps a hijacking server completes with a device that has this policy."""
    net.join(0, policy=policy)
    assert net.fleet.wait_for(1, 20)
    student = method_of(net).student
    torch.manual_seed(0)
    attacker = Hijacker(student.bottom, student.features, public_of(net))
    steps = 0
    state = student.bottom.state_dict()
    for _ in hijack(net.fleet, attacker, state, active=(0,), rounds=1, steps=WINDOW + 4, lr=0.02):
        steps += 1
    return steps


def test_a_device_that_refuses_hijacking_leaves_and_names_the_reason(
    digits: Network, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RoundAborted):
        hijacked(digits, DevicePolicy(hijacking="refuse"))
    digits.clients[0].join(10)
    error = digits.clients[0].error
    assert isinstance(error, Rejected) and "gradients look like hijacking" in str(error)
    assert "the client's policy: gradients look like hijacking" in audited(caplog)[-1]


def test_a_device_that_only_warns_continues(
    digits: Network, caplog: pytest.LogCaptureFixture
) -> None:
    assert hijacked(digits, DevicePolicy(hijacking="warn")) == WINDOW + 4
    warnings = [r.getMessage() for r in caplog.records if "look like hijacking" in r.getMessage()]
    assert len(warnings) == 1 and warnings[0].endswith("the policy says to go on")


def test_an_honest_server_is_not_refused(digits: Network) -> None:
    digits.join(0, policy=DevicePolicy(hijacking="refuse"))
    assert digits.fleet.wait_for(1, 20)
    digits.experiment.method.round(0)
    assert digits.clients[0].error is None and digits.fleet.present() == [0]


def test_alignment_by_hand() -> None:
    same, apart = torch.ones(6, 3), torch.eye(6)
    assert alignment(same) == pytest.approx(1.0)
    assert alignment(apart) == pytest.approx(0.0)
    assert alignment(torch.cat([same, -same])) == pytest.approx(-1 / 11)
    # Rows of images whose label is not trusted are nothing, and do not count.
    assert alignment(torch.cat([same, torch.zeros(50, 3)])) == pytest.approx(1.0)
    assert alignment(torch.zeros(8, 3)) is None


def test_a_window_is_needed_and_the_limit_is_a_mean() -> None:
    watching = HijackDetector()
    for _ in range(WINDOW - 1):
        assert watching.look(torch.ones(8, 4)) is None
    assert f"the limit is {LIMIT:g}" in (watching.look(torch.ones(8, 4)) or "")
    calm = HijackDetector()
    for step in range(3 * WINDOW):
        assert calm.look(torch.ones(8, 8) if step % 3 == 0 else torch.eye(8)) is None


def test_a_few_long_rows_do_not_hide_the_others() -> None:
    """Four rows have as long gradients as a device takes; the others' share of the longest is 1e-4."""
    watching, torch_rows = HijackDetector(), torch.Generator().manual_seed(0)
    reasons = []
    for _ in range(WINDOW):
        hidden = torch.ones(60, 256) * 1e-4
        decoys = torch.randn(4, 256, generator=torch_rows)
        reasons.append(watching.look(torch.cat([decoys, hidden])))
    assert reasons[-1] is not None and "look like hijacking" in reasons[-1]


def test_gradients_of_dead_features_evade_the_watch() -> None:
    """docs/leakage.md: the watch is a sign. An attacker that knows it loses nothing."""
    draws = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    bottom = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU())
    watching, reasons = HijackDetector(), []
    for _ in range(WINDOW + 4):
        features = bottom(torch.randn(32, 64, generator=draws))
        alive = features > 0
        hijack_rows = alive * torch.ones(256)
        decoys = ~alive * torch.randn(32, 256, generator=draws) * 10
        wanted, sent = (
            torch.autograd.grad(features, bottom[0].weight, gradients, retain_graph=True)[0]
            for gradients in (hijack_rows, hijack_rows + decoys)
        )
        assert torch.equal(wanted, sent), "the bottom learns what the server wants"
        reasons.append(watching.look(hijack_rows + decoys))
    assert not any(reasons)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_batches_below_four_rows_are_judged_together(rows: int) -> None:
    watching, calm = HijackDetector(), HijackDetector()
    apart = torch.eye(8)
    reasons, innocent = [], []
    for step in range(4 * WINDOW):
        reasons.append(watching.look(torch.ones(rows, 8)))
        innocent.append(calm.look(apart[torch.arange(step, step + rows) % 8]))
    assert any(reasons) and not any(innocent)
