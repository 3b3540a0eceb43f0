"""Teacher features that cross once per image: every fleet alike and to the byte, exact after a resume."""

from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from semisfl.costs.about_images import AboutImages
from semisfl.costs.rounds import Priced
from semisfl.data.positions import draw_positions
from semisfl.fleet import teacher_once
from semisfl.fleet.codec import Cast
from semisfl.metrics import RoundMetrics
from semisfl.net.messages import hello
from semisfl.runs.loop import run_rounds
from semisfl.settings.catalog import METHODS
from semisfl.settings.config import Config, ConfigError, parse
from semisfl.settings.run import WireConfig
from tests.fleet.test_every_fleet import FLEETS
from tests.net.harness import BATCHNORM, network, tiny, toy_data

CODED = dict.fromkeys(("student_features", "teacher_features", "gradients", "models"), "int8")
WIRES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "once": {"teacher_once": True},
    "once, int8": {**CODED, "teacher_once": True},
}
both = pytest.mark.parametrize("wire", ["once", "once, int8"])
Counts = Counter[tuple[str, str, int]]


def settings(wire: str, **more: Any) -> Config:
    """Each client holds 12 images and draws each of them twice in a round of 6 steps."""
    changes: dict[str, Any] = {
        "model": {"layers": BATCHNORM},
        "clients": {"steps": 6, "active": 2},
        # Some labels are kept and some are not, and no other term has gradients.
        "semisfl": {"confidence_threshold": 0.4, "clustering": False},
        "rounds": 3,
        **more,
    }
    return tiny(3, wire=WIRES[wire], **changes)


@cache
def finished(fleet: str, wire: str) -> tuple[list[RoundMetrics], Counts]:
    with FLEETS[fleet](settings(wire)) as fixture:
        rows = [RoundMetrics.from_dict(row) for row in run_rounds(fixture.experiment).rounds]
        return rows, Counter(fixture.experiment.fleet.traffic.counts)


def losses(rows: list[RoundMetrics]) -> list[Any]:
    return [(row.loss_semi, row.loss_supervised, row.mask_rate, row.accuracies) for row in rows]


@pytest.mark.parametrize("fleet", [name for name in FLEETS if name != "local"])
@both
def test_every_fleet_computes_and_counts_alike(fleet: str, wire: str) -> None:
    rows, counts = finished(fleet, wire)
    ours, counted = finished("local", wire)
    assert losses(rows) == losses(ours)
    assert counts == counted
    assert [row.bytes_by_client for row in rows] == [row.bytes_by_client for row in ours]


def kinds(wire: str) -> dict[str, int]:
    return finished("local", wire)[0][-1].bytes or {}


def test_fewer_features_cross_and_as_much_of_the_other_kinds() -> None:
    whole, once = kinds("nothing"), kinds("once")
    assert {kind for kind, size in once.items() if size != whole[kind]} == {"features_up"}
    # 12 of 24 rows of the teacher's, all 24 of the student's.
    assert once["features_up"] * 4 == whole["features_up"] * 3


def test_losses_change_a_little() -> None:
    ours, whole = (finished("local", name)[0][1].loss_semi for name in ("once", "nothing"))
    assert ours != whole
    assert ours == pytest.approx(whole, rel=0.3)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "supervised"])
def test_a_plan_says_what_crosses(method: str) -> None:
    config = settings("once, int8", method=method, clients={"steps": 6, "active": 3}, rounds=1)
    data, _ = toy_data(3)
    priced = Priced.of(config, AboutImages(data.shape, len(data.classes), 12))
    usual = priced.usual
    if usual is None or not usual.features:
        assert priced.sizes.teacher_once is not None  # not used by methods that send whole models
        return
    with FLEETS["local"](config) as fixture:
        (row,) = run_rounds(fixture.experiment).rounds
    for group in row["bytes_by_client"]:
        message = usual.by_kind() | {"clients": group["clients"]}
        if "teacher_down" not in group:  # FedSwitch-SL may label without one
            del message["teacher_down"]
        assert group == message


@both
def test_a_resumed_run_is_the_same(wire: str) -> None:
    straight = losses(finished("local", wire)[0])
    with FLEETS["local"](settings(wire)) as first:
        method = first.experiment.method
        method.round(0)
        state = first.experiment.state_dict()
        with FLEETS["local"](settings(wire)) as second:
            second.experiment.load_state_dict(state)
            rows = run_rounds(second.experiment, first=1).rounds
    assert losses([RoundMetrics.from_dict(row) for row in rows]) == straight[1:]


def test_features_pass_through_the_policy_before_rows_are_left_out() -> None:
    policy = {"clip": 1.0, "noise": 0.1, "update_clip": 1.0, "update_noise": 1e-3}
    with network(settings("once, int8", rounds=2, policy=policy)) as net:
        net.join_all()
        rows = run_rounds(net.experiment).rounds
        assert [row["contributing"] for row in rows] == [2, 2]
        assert not any(client.error for client in net.clients.values())


# --- one by one ------------------------------------------------------------------------------------------


def test_first_uses_are_told_from_later_ones_also_within_a_batch() -> None:
    numbers, new = teacher_once.first_uses(np.array([[7, 3, 7], [3, 9, 7]]))
    assert numbers.tolist() == [[1, 0, 1], [0, 2, 1]]
    assert new.tolist() == [[True, True, False], [False, True, False]]


def test_a_server_puts_back_what_crossed_before() -> None:
    rows = teacher_once.TeacherRows(seed=3, index=1, client=0, images=5, steps=4, batch=5)
    seen: dict[int, float] = {}
    value = 0.0
    for step in range(4):
        drawn = draw_positions(3, 1, 0, 5, 4, 5)[step]
        fresh = [image for place, image in enumerate(drawn) if image not in (*seen, *drawn[:place])]
        assert rows.new(step) == len(fresh)
        for image in fresh:
            seen[image] = value = value + 1
        received = torch.tensor([[seen[image]] for image in fresh]).reshape(-1, 1)
        assert rows.all_rows(step, received).flatten().tolist() == [seen[image] for image in drawn]


@pytest.mark.parametrize("images", [20, 21, 500])
def test_a_server_draws_nothing_for_a_client_with_more_images_than_a_round_shows(
    images: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim of ten million images must not cost the server a shuffle of ten million."""
    assert len(np.unique(draw_positions(3, 1, 0, images, 4, 5))) == 20, "none is shown twice"
    monkeypatch.setattr(teacher_once, "draw_positions", None)
    rows = teacher_once.TeacherRows(seed=3, index=1, client=0, images=images, steps=4, batch=5)
    for step in range(4):
        assert rows.new(step) == 5
        received = torch.arange(5.0).unsqueeze(1) + 10 * step
        assert torch.equal(rows.all_rows(step, received), received)


# --- refusals --------------------------------------------------------------------------------------------


def test_teachers_that_follow_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"wire.teacher_once.*semisfl.client_teacher = 'frozen'"):
        parse({"wire": {"teacher_once": True}, "semisfl": {"client_teacher": "ema"}})


def test_a_codec_that_mixes_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mixing(Cast):
        def size(self, shape: Any) -> int:
            return 7

    monkeypatch.setattr(teacher_once, "codec_named", lambda name: Mixing(name, torch.float32))
    with pytest.raises(
        ConfigError, match=r"wire.teacher_features = 'fp32' does not encode rows one by one"
    ):
        teacher_once.check(WireConfig(teacher_once=True))
    teacher_once.check(WireConfig())


def test_a_client_that_does_not_know_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semisfl.net.messages.hello", _old_hello)
    with network(settings("once")) as net:
        client = net.join(0)
        client.join(20)
        assert "does not know the codecs teacher_once; install the same" in str(client.error)


def _old_hello(*arguments: Any, **named: Any) -> dict[str, Any]:
    fields = hello(*arguments, **named)
    return fields | {"codecs": [name for name in fields["codecs"] if name != "teacher_once"]}
