"""What need not cross: over every fleet alike and to the byte, lossless where it says so, and exact after a resume."""

from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from semisfl.costs.about_images import AboutImages
from semisfl.costs.rounds import Priced
from semisfl.fleet import savings
from semisfl.fleet.codec import Cast
from semisfl.metrics import RoundRow
from semisfl.runs.loop import run_rounds
from semisfl.settings.catalog import METHODS
from semisfl.settings.config import Config, ConfigError, parse
from semisfl.settings.run import SAVINGS, WireConfig
from tests.fleet.test_every_fleet import BATCHNORM, FLEETS
from tests.net.harness import network, tiny, toy_data

CODED = dict.fromkeys(("student_features", "teacher_features", "gradients", "models"), "int8")
WIRES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "teacher once": {"teacher_once": True},
    "used rows": {"gradient_rows": "used"},
    "updates": {"updates": "int8"},
    "all": {**CODED, "updates": "int4", "teacher_once": True, "gradient_rows": "used"},
}
every_saving = pytest.mark.parametrize("wire", [name for name in WIRES if name != "nothing"])
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
def finished(fleet: str, wire: str) -> tuple[list[RoundRow], Counts]:
    with FLEETS[fleet](settings(wire)) as fixture:
        rows = [RoundRow.from_dict(row) for row in run_rounds(fixture.experiment).rounds]
        return rows, Counter(fixture.experiment.fleet.traffic.counts)


def losses(rows: list[RoundRow]) -> list[Any]:
    return [(row.loss_semi, row.loss_supervised, row.mask_rate, row.accuracies) for row in rows]


@pytest.mark.parametrize("fleet", [name for name in FLEETS if name != "local"])
@every_saving
def test_every_fleet_computes_and_counts_alike(fleet: str, wire: str) -> None:
    rows, counts = finished(fleet, wire)
    ours, counted = finished("local", wire)
    assert losses(rows) == losses(ours)
    assert counts == counted
    assert [row.bytes_by_client for row in rows] == [row.bytes_by_client for row in ours]


def kinds(wire: str) -> dict[str, int]:
    return finished("local", wire)[0][-1].bytes or {}


def test_each_sends_less_of_one_kind_and_as_much_of_the_others() -> None:
    whole = kinds("nothing")
    changed = {
        wire: {kind for kind, size in kinds(wire).items() if size != whole[kind]}
        for wire in ("teacher once", "used rows", "updates")
    }
    assert changed == {
        "teacher once": {"features_up"},
        "used rows": {"gradients_down"},
        "updates": {"model_up", "teacher_down"},
    }
    # 12 of 24 rows of the teacher's, all 24 of the student's.
    assert kinds("teacher once")["features_up"] * 4 == whole["features_up"] * 3
    rows, _ = finished("local", "used rows")
    kept = [1 - (row.mask_rate or 0.0) for row in rows]
    assert 0.1 < sum(kept) / 3 < 0.9
    images, width = 2 * 6 * 4, whole["gradients_down"] // (3 * 2 * 6 * 4)
    expected = sum(round(share * images) for share in kept) * width + 3 * 2 * 6 * 1
    assert kinds("used rows")["gradients_down"] == expected


def test_without_rows_of_zeros_the_losses_are_the_same_to_the_bit() -> None:
    assert losses(finished("local", "used rows")[0]) == losses(finished("local", "nothing")[0])


@pytest.mark.parametrize("wire", ["teacher once", "updates"])
def test_the_others_change_them_a_little(wire: str) -> None:
    ours, whole = (finished("local", name)[0][1].loss_semi for name in (wire, "nothing"))
    assert ours != whole
    assert ours == pytest.approx(whole, rel=0.3)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "supervised"])
def test_a_plan_says_what_at_most_crosses(method: str) -> None:
    """And exactly so but for rows of gradients, which nobody knows beforehand."""
    config = settings("all", method=method, clients={"steps": 6, "active": 3}, rounds=1)
    data, _ = toy_data(3)
    priced = Priced.of(config, AboutImages(data.shape, len(data.classes), 12))
    usual = priced.usual
    if usual is None or not usual.features:
        assert priced.sizes.update is not None  # whole models know nothing of it
        return
    with FLEETS["local"](config) as fixture:
        (row,) = run_rounds(fixture.experiment).rounds
    for group in row["bytes_by_client"]:
        said = usual.by_kind() | {"clients": group["clients"]}
        if "teacher_down" not in group:  # FedSwitch-SL may label without one
            del said["teacher_down"]
        assert group.pop("gradients_down") <= said.pop("gradients_down")
        assert group == said


@every_saving
def test_a_resumed_run_is_the_same(wire: str) -> None:
    straight = losses(finished("local", wire)[0])
    with FLEETS["local"](settings(wire)) as first:
        method = first.experiment.method
        method.round(0)
        state = first.experiment.state_dict()
        with FLEETS["local"](settings(wire)) as second:
            second.experiment.load_state_dict(state)
            rows = run_rounds(second.experiment, first=1).rounds
    assert losses([RoundRow.from_dict(row) for row in rows]) == straight[1:]


def test_what_a_policy_protects_is_left_out_and_sent_all_the_same() -> None:
    """Features and bottoms pass through the policy before any of them is left out."""
    policy = {"clip": 1.0, "noise": 0.1, "update_clip": 1.0}
    with network(settings("all", rounds=2, policy=policy)) as net:
        net.join_all()
        rows = run_rounds(net.experiment).rounds
        assert [row["contributing"] for row in rows] == [2, 2]
        assert not any(client.error for client in net.clients.values())


# --- one by one ------------------------------------------------------------------------------------------


def test_first_uses_are_told_from_later_ones_also_within_a_batch() -> None:
    numbers, new = savings.first_uses(np.array([[7, 3, 7], [3, 9, 7]]))
    assert numbers.tolist() == [[1, 0, 1], [0, 2, 1]]
    assert new.tolist() == [[True, True, False], [False, True, False]]


def test_a_server_puts_back_what_crossed_before() -> None:
    rows = savings.TeacherRows(seed=3, index=1, client=0, images=5, steps=4, batch=5)
    seen: dict[int, float] = {}
    value = 0.0
    for step in range(4):
        drawn = savings.draw_positions(3, 1, 0, 5, 4, 5)[step]
        fresh = [image for place, image in enumerate(drawn) if image not in (*seen, *drawn[:place])]
        assert rows.new(step) == len(fresh)
        for image in fresh:
            seen[image] = value = value + 1
        came = torch.tensor([[seen[image]] for image in fresh]).reshape(-1, 1)
        assert rows.whole(step, came).flatten().tolist() == [seen[image] for image in drawn]


@pytest.mark.parametrize("batch", [1, 7, 8, 9])
def test_a_bitmap_says_which_rows_came(batch: int) -> None:
    whole = torch.randn(batch, 3)
    whole[::2] = 0
    used = savings.carry_something(whole)
    bits = savings.as_bits(used)
    assert len(bits) == savings.bitmap_bytes(batch)
    assert torch.equal(savings.spread(whole[used], bits, batch), whole)
    with pytest.raises(ValueError, match="but their bitmap has"):
        savings.spread(torch.ones(batch + 1, 3), bits, batch)


def test_what_is_no_number_carries_something() -> None:
    assert savings.carry_something(torch.tensor([[0.0, torch.nan], [0.0, -0.0]])).tolist() == [
        True,
        False,
    ]


def test_a_difference_is_coded_finer_than_the_whole() -> None:
    known = {"weight": torch.randn(6, 40), "steps": torch.tensor(3)}
    state = {"weight": known["weight"] + 1e-3 * torch.randn(6, 40), "steps": torch.tensor(5)}
    errors = []
    for wire in (WireConfig(models="int8"), WireConfig(models="int8", updates="int8")):
        found = savings.arrived(known, savings.crossing(known, state, wire), wire)
        assert found["steps"] == 5
        errors.append(float((found["weight"] - state["weight"]).abs().max()))
    assert errors[1] < errors[0] / 100


# --- refusals --------------------------------------------------------------------------------------------


def test_teachers_that_follow_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"wire.teacher_once.*teacher.client = 'frozen'"):
        parse({"wire": {"teacher_once": True}, "teacher": {"client": "ema"}})


def test_a_codec_that_mixes_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mixing(Cast):
        def size(self, shape: Any) -> int:
            return 7

    monkeypatch.setattr(savings, "codec_named", lambda name: Mixing(name, torch.float32))
    with pytest.raises(
        ConfigError, match=r"wire.gradients = 'fp32' does not encode rows one by one"
    ):
        savings.check(WireConfig(gradient_rows="used"))
    savings.check(WireConfig())


@pytest.mark.parametrize("saving", SAVINGS)
def test_a_client_that_does_not_know_it_is_refused(
    saving: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = tuple(name for name in SAVINGS if name != saving)
    monkeypatch.setattr("semisfl.net.messages.SAVINGS", known)
    with network(settings("all")) as net:
        client = net.join(0)
        client.join(20)
        assert f"does not know the codecs {saving}; install the same" in str(client.error)
