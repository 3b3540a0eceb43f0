"""Test that everything leaves a client in one place, and nothing that its policy forbids."""

import struct
from typing import Any

import pytest
import torch

from semisfl.fleet.base import SplitRound
from semisfl.fleet.outgoing import Cleared, Outgoing, Parts
from semisfl.net.chunks import PREFIX
from semisfl.net.client.connection import Connection
from semisfl.runs.experiment import Experiment, assemble
from semisfl.settings.policy import DevicePolicy, Policy, PolicyBreach
from tests.net.harness import network, tiny, toy_data

UPDATES = {"update_clip": 1e-3, "update_noise": 1e-3}
"""What a policy that clips features has to have as well."""


NOISY = Policy(clip=2.0, noise=0.1, update_clip=1e-3, update_noise=1e-3)


def simulated(**changes: Any) -> Experiment:
    config = tiny(3, **changes)
    data, partition = toy_data(config.clients.total)
    return assemble(config, data, partition, device="cpu")


def first_features(experiment: Experiment) -> tuple[torch.Tensor, torch.Tensor]:
    bottom = experiment.method.state_dict()["student"]
    state = {
        key.removeprefix("bottom."): v for key, v in bottom.items() if key.startswith("bottom.")
    }
    experiment.fleet.start_round(SplitRound(0, (0, 1, 2), 2, 0.02, state, state))
    features = experiment.fleet.forward()
    return features.student.detach(), features.teacher


def test_features_are_clipped_to_the_norm_the_policy_names() -> None:
    plain, _ = first_features(simulated())
    limit = float(plain.norm(dim=1).median())
    clipped, _ = first_features(simulated(policy={"clip": limit, **UPDATES}))
    short = plain.norm(dim=1) <= limit
    assert short.any() and not short.all()
    assert torch.allclose(clipped[short], plain[short], rtol=1e-5)
    assert torch.allclose(clipped.norm(dim=1)[~short], torch.tensor(limit), rtol=1e-5)


def test_noise_has_the_deviation_the_policy_names_and_is_drawn_anew_for_every_row() -> None:
    plain, plain_teacher = first_features(simulated())
    noisy, noisy_teacher = first_features(simulated(policy={"clip": 1e6, "noise": 3e-6, **UPDATES}))
    for noise in (noisy - plain, noisy_teacher - plain_teacher):
        assert noise.std().item() == pytest.approx(3.0, rel=0.1)
        similarity = torch.corrcoef(noise).fill_diagonal_(0).abs().max()
        assert similarity < 0.5


def test_noise_of_a_simulation_repeats_and_a_devices_does_not() -> None:
    one, _ = first_features(simulated(policy={"clip": 2.0, "noise": 0.5, **UPDATES}))
    two, _ = first_features(simulated(policy={"clip": 2.0, "noise": 0.5, **UPDATES}))
    assert torch.equal(one, two)
    config = tiny(1, policy={"clip": 2.0, "noise": 0.5, **UPDATES})
    drawn = []
    for _ in range(2):
        outgoing = Outgoing(unpredictable=True)
        outgoing.agree(config)
        outgoing.start_round(0, (0,), simulated().hardware)
        drawn.append(outgoing.clip_and_noise(torch.ones(2, 8), 1))
    assert not torch.equal(*drawn)


def test_a_device_repeats_its_noise_for_rows_of_a_frozen_bottom_alone() -> None:
    config = tiny(1, policy={"clip": 2.0, "noise": 0.5, **UPDATES})
    outgoing, rows = Outgoing(unpredictable=True), torch.ones(2, 3, 8)
    outgoing.agree(config)
    sent = []
    for secret, seeds in ((b"a", [1, 2]), (b"a", [2, 1]), (b"b", [1, 2])):
        outgoing.secret = secret
        cleared = outgoing.views(rows, 1, seeds).tensors
        sent.append(torch.cat([cleared["weak"][:, None], cleared["strong"].view(2, 2, 8)], 1))
    assert torch.equal(sent[0], sent[1].flip(0)) and not torch.equal(sent[0], sent[2])
    assert len(sent[0].flatten().unique()) > 30, "no two values have the same noise"
    outgoing.agree(config)  # with other terms
    drawn = [outgoing.clip_and_noise(rows[0], 1) for _ in range(2)]
    assert not torch.equal(*drawn)


def test_noise_of_a_simulation_is_another_one_in_every_round_and_client() -> None:
    outgoing, hardware = Outgoing(), simulated().hardware
    outgoing.agree(tiny(2, policy={"clip": 2.0, "noise": 0.5, **UPDATES}))
    drawn = []
    for index, clients in ((0, (0, 1)), (1, (0, 1)), (0, (0, 1))):
        outgoing.start_round(index, clients, hardware)
        drawn += outgoing.clip_and_noise(torch.ones(2, 8), 2)
    assert torch.equal(torch.stack(drawn[:2]), torch.stack(drawn[4:]))
    assert len({tuple(row.tolist()) for row in drawn}) == 4


def test_gradients_go_back_through_the_clip_and_the_noise() -> None:
    """Held against the derivative by hand: noise is the same whatever the row."""
    outgoing = Outgoing()
    outgoing.agree(tiny(1, policy={"noise": 0.3, "clip": 2.0, **UPDATES}))
    outgoing.start_round(0, (0,), simulated().hardware)
    rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)) * 5
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    _, guarded = outgoing.features(rows, rows, 1)
    ours = guarded.gradient(inputs)
    unit = rows / rows.norm(dim=1, keepdim=True)
    across = inputs - (inputs * unit).sum(1, keepdim=True) * unit
    assert torch.allclose(ours, across * 2.0 / rows.norm(dim=1, keepdim=True), atol=1e-5)


def test_a_bottoms_change_is_limited_and_noised() -> None:
    outgoing = Outgoing()
    outgoing.agree(tiny(1, policy={"update_clip": 2.0}))
    sent = {"w": torch.zeros(10, 10), "n": torch.tensor(3)}
    trained = {"w": torch.ones(10, 10), "n": torch.tensor(4)}
    leaving = outgoing.bottom(sent, trained).tensors
    assert leaving["w"].norm().item() == pytest.approx(2.0) and leaving["n"] == 4
    small = {"w": torch.full((10, 10), 0.1), "n": torch.tensor(4)}
    assert torch.allclose(outgoing.bottom(sent, small).tensors["w"], small["w"])
    outgoing.agree(tiny(1, policy={"update_clip": 2.0, "update_noise": 50.0}))
    outgoing.start_round(0, (0,), simulated().hardware)
    noisy = outgoing.bottom(sent, trained).tensors
    assert noisy["w"].std().item() == pytest.approx(100.0, rel=0.3)


def test_the_limit_of_a_bottoms_change_is_for_all_its_tensors_together() -> None:
    outgoing = Outgoing()
    outgoing.agree(tiny(1, policy={"update_clip": 2.0}))
    sent = {"w": torch.zeros(3, 3), "b": torch.ones(16)}
    trained = {"w": torch.ones(3, 3), "b": torch.full((16,), 2.0)}  # moves of norm 3 and 4: 5
    leaving = outgoing.bottom(sent, trained).tensors
    for name, norm in {"w": 3, "b": 4}.items():
        assert (leaving[name] - sent[name]).norm().item() == pytest.approx(2.0 * norm / 5), name


def test_noise_leaves_no_variance_negative() -> None:
    """A server refuses such a state, and would shut out a client that only protects its images."""
    outgoing = Outgoing()
    outgoing.agree(tiny(1, policy={"update_clip": 1.0, "update_noise": 10.0}))
    outgoing.start_round(0, (0,), simulated().hardware)
    names = ("bn.running_var", "bn.running_mean")
    sent = {name: torch.full((50,), 0.1) for name in names}
    leaving = outgoing.bottom(sent, sent).tensors
    assert (leaving["bn.running_var"] >= 0).all() and leaving["bn.running_var"].max() > 1
    assert leaving["bn.running_mean"].min() < -1


def test_clients_of_a_simulation_leave_when_their_caps_are_used_up() -> None:
    experiment = simulated(
        policy={"uses_per_image": 3}, clients={"active": 2, "steps": 4}, rounds=3
    )
    fleet = experiment.fleet
    experiment.method.round(0)
    assert len(fleet.present()) == 1
    resumed = simulated(policy={"uses_per_image": 3}, clients={"active": 2, "steps": 4}, rounds=3)
    resumed.load_state_dict(experiment.state_dict())
    assert resumed.fleet.present() == fleet.present()
    experiment.method.round(1)
    with pytest.raises(ValueError, match=r"no client is left: an image .* uses_per_image = 3"):
        fleet.wait_ready()


def test_terms_that_break_the_policy_are_refused_before_anything_is_computed() -> None:
    with pytest.raises(PolicyBreach, match=r"wire\.student_features = 'fp32' is finer"):
        simulated(policy={"codec": "int8"})


# --- every byte -----------------------------------------------------------------------------------


def test_every_byte_that_a_device_writes_was_made_in_one_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that reaches gRPC, put together again, is what `Outgoing.frame` gave, in its order."""
    made: dict[int, list[bytes]] = {}
    written: dict[int, list[bytes]] = {}
    honest_frame, honest_send = Outgoing.frame, Connection._send

    def frame(self: Outgoing, *arguments: Any) -> Parts:
        parts = honest_frame(self, *arguments)
        made.setdefault(id(self), []).append(b"".join(parts))
        return parts

    async def send(self: Connection, call: Any, *arguments: Any) -> None:
        class Recorded:
            async def write(self, chunk: bytes) -> None:
                payload = bytes(chunk)[PREFIX.size :]
                if payload:
                    written.setdefault(key, []).append(payload)
                await call.write(chunk)

        key = id(self.outgoing)
        await honest_send(self, Recorded(), *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Outgoing, "frame", frame)
    monkeypatch.setattr(Connection, "_send", send)
    with network(tiny(2, rounds=1, policy=NOISY.model_dump(exclude_defaults=True))) as net:
        net.join_all()
        net.experiment.method.round(0)
    assert len(made) == 2
    for device, frames in made.items():
        assert b"".join(written[device]) == b"".join(frames)
        kinds = [_kind(data) for data in frames]
        assert kinds == ["hello", "ready", "features", "features", "bottom"]


def _kind(data: bytes) -> str:
    import msgpack

    length = struct.unpack_from("<I", data, 8)[0]
    return str(msgpack.unpackb(data[16 : 16 + length])[0])


# --- tensors that may leave -------------------------------------------------------------------------


def device(policy: Policy, frames: list[tuple[str, set[str]]]) -> Outgoing:
    def encode(kind: str, _: Any, tensors: Any, *more: Any) -> Parts:
        frames.append((kind, set(tensors)))
        return []

    outgoing = Outgoing(policy, encode)
    outgoing.agree(tiny(1))
    outgoing.start_round(0, (0,), simulated().hardware)
    return outgoing


@pytest.mark.parametrize("policy", [Policy(), NOISY])
def test_a_frame_takes_only_tensors_that_a_policy_cleared(policy: Policy) -> None:
    frames: list[tuple[str, set[str]]] = []
    outgoing, raw = device(policy, frames), torch.rand(4, 8)
    with pytest.raises(PolicyBreach, match="did not pass through the policy"):
        outgoing.frame("features", {}, {"student": raw, "teacher": raw})  # type: ignore[arg-type]
    assert not frames
    cleared, _ = outgoing.features(raw, raw, 1)
    outgoing.frame("features", {}, cleared)
    outgoing.frame("bottom", {}, outgoing.bottom({"w": raw}, {"w": raw}).under("bottom"))
    assert frames == [("features", {"student", "teacher"}), ("bottom", {"bottom/w"})]


def test_only_a_policy_makes_cleared_tensors() -> None:
    with pytest.raises(TypeError, match="only a policy clears tensors"):
        Cleared(object(), "features", Policy(), {"student": torch.rand(4, 8)})


def test_cleared_tensors_leave_once_in_their_own_kind_and_under_their_own_policy() -> None:
    frames: list[tuple[str, set[str]]] = []
    outgoing, raw = device(NOISY, frames), torch.rand(4, 8)
    lax, _ = device(Policy(), []).features(raw, raw, 1)
    cleared, _ = outgoing.features(raw, raw, 1)
    for kind, wrong in (("features", lax), ("bottom", cleared)):
        with pytest.raises(PolicyBreach, match="did not pass"):
            outgoing.frame(kind, {}, wrong)
    outgoing.frame("features", {}, cleared)
    with pytest.raises(PolicyBreach, match="did not pass"):
        outgoing.frame("features", {}, cleared)
    assert len(frames) == 1


def test_nothing_can_be_added_to_cleared_tensors() -> None:
    frames: list[tuple[str, set[str]]] = []
    outgoing, raw = device(Policy(), frames), torch.rand(4, 8)
    cleared, _ = outgoing.features(raw, raw, 1)
    cleared.tensors["images"] = raw
    outgoing.frame("features", {}, cleared)
    assert frames == [("features", {"student", "teacher"})]


def test_whole_models_leave_only_where_the_policy_says_so() -> None:
    frames: list[tuple[str, set[str]]] = []
    open_to_models = device(DevicePolicy(full_models=True), frames)
    models = {"model/w": torch.rand(2)}
    open_to_models.frame("states", {}, open_to_models.models(models))
    assert frames == [("states", {"model/w"})]
    with pytest.raises(PolicyBreach, match="whole models"):
        device(Policy(), frames).models(models)
