"""The in-process fleet by itself: a split round step by step, and its bytes to the last one."""

import copy
from functools import partial
from math import prod

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from semisfl import seeds
from semisfl.data.batches import split_views
from semisfl.data.dataset import Dataset
from semisfl.engine.hardware import Hardware
from semisfl.fleet.base import SplitRound, mean_state
from semisfl.fleet.byte_counts import Traffic
from semisfl.fleet.local import LocalFleet
from semisfl.fleet.setup import FleetSetup
from semisfl.models import split as models
from semisfl.models.build import build
from semisfl.models.layers import adopt_layers, batchnorms, use_generator
from semisfl.models.split import SplitModel
from semisfl.models.stack import Stack
from semisfl.settings import config
from semisfl.settings.config import Config
from tests.twin import bn_model, follow, largest_difference, plain_mean, toy_data

ACTIVE = (0, 2, 3)
STEPS, BATCH = 3, 5
DATA = toy_data(60, 9)


def settings(*assignments: str) -> Config:
    clients = {"total": 4, "active": 3, "batch": BATCH, "steps": STEPS}
    values = {"clients": clients, "seed": 2, "data": {"augment": {"cutout": 4}}}
    return config.parse(config.override(values, list(assignments)))


def make_fleet(model: SplitModel, chosen: Config, data: Dataset = DATA) -> LocalFleet:
    setup = FleetSetup(
        chosen,
        model,
        Hardware("cpu", chosen.runtime),
        data.shape,
        len(data.classes),
        data.mean,
        data.std,
        images=data.images,
        labels=data.labels,
        shards=np.array_split(np.arange(len(data.images)), 4),
    )
    return LocalFleet(setup)


def split_model(name: str) -> SplitModel:
    if name == "bn":
        return models.split(bn_model(), (1, 16, 16), projection=4)
    if name == "dropout":
        return models.split(bn_model(), (1, 16, 16), cut=12, projection=4)
    return build(name, (1, 16, 16), 3, projector="none", seed=1)


def start(fleet: LocalFleet, model: SplitModel, index: int = 0, **more: object) -> SplitRound:
    plan = SplitRound(
        index,
        ACTIVE,
        STEPS,
        0.05,
        model.bottom.state_dict(),
        model.bottom.state_dict(),
        **more,  # type: ignore[arg-type]
    )
    fleet.start_round(plan)
    return plan


def pull(rows: int, width: int, step: int) -> Tensor:
    return torch.from_numpy(seeds.generator(step, "pull").normal(size=(rows, width))).float() / 10


def do_round(
    fleet: LocalFleet, model: SplitModel, index: int = 0, **more: object
) -> dict[str, Tensor]:
    start(fleet, model, index, **more)
    for step in range(STEPS):
        features = fleet.forward()
        fleet.backward(pull(*features.student.shape, step))
    return fleet.finish_round()


# --- what happens to the weights ---------------------------------------------------------------------


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", ["cnn", "bn", "dropout"])
def test_a_round_is_what_separate_clients_would_do(
    name: str, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semisfl.fleet.block.Stack", partial(Stack, together=together))
    model, chosen = split_model(name), settings()
    fleet = make_fleet(model, chosen)
    bottoms = [copy.deepcopy(model.bottom).train() for _ in ACTIVE]
    for client, bottom in zip(ACTIVE, bottoms, strict=True):
        use_generator(bottom, torch.Generator().manual_seed(seeds.derive(2, "dropout", 0, client)))
    sgds = [
        torch.optim.SGD(
            bottom.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4
        )
        for bottom in bottoms
    ]
    start(fleet, model)
    for step in range(STEPS):
        strong = fleet.block.batches.get("strong").split(BATCH)
        outputs = [bottom(images) for bottom, images in zip(bottoms, strong, strict=True)]
        features = fleet.forward()
        # BatchNorm of five rows enlarges what one large product rounds differently from small ones.
        rtol = 2e-5 if together else 0.0
        torch.testing.assert_close(
            features.student.detach(), torch.cat(outputs), atol=1e-5, rtol=rtol
        )
        gradients = pull(*features.student.shape, step)
        for output, rows, sgd in zip(outputs, gradients.split(BATCH), sgds, strict=True):
            sgd.zero_grad()
            output.backward(rows)
            sgd.step()
        fleet.backward(gradients)
    mean = fleet.finish_round()
    assert largest_difference(mean, plain_mean([bottom.state_dict() for bottom in bottoms])) < 1e-5
    assert largest_difference(mean, model.bottom.state_dict()) > 1e-3


def test_features_name_their_clients_and_their_images() -> None:
    model = split_model("cnn")
    fleet = make_fleet(model, settings())
    start(fleet, model)
    features = fleet.forward()
    assert features.clients == ACTIVE and features.batch == BATCH
    assert features.owner.tolist() == [0] * BATCH + [1] * BATCH + [2] * BATCH
    assert features.student.requires_grad and not features.teacher.requires_grad
    assert features.student.shape == (15, model.features) == features.teacher.shape
    # Labels are the images' numbers modulo 3.
    views = [
        split_views(
            fleet.block.batches.augmentation,
            fleet.block.shards[client],
            (16, 16),
            STEPS,
            BATCH,
            2,
            0,
            client,
        )
        for client in ACTIVE
    ]
    shown = np.concatenate([view["weak"].indices[0] for view in views])
    assert features.truth is not None and features.truth.tolist() == (shown % 3).tolist()


def test_frozen_teacher_labels_with_what_was_sent() -> None:
    model = split_model("cnn")
    fleet = make_fleet(model, settings())
    teacher = copy.deepcopy(model.bottom).eval()
    start(fleet, model)
    for step in range(STEPS):
        expected = teacher(fleet.block.batches.get("weak"))
        features = fleet.forward()
        torch.testing.assert_close(features.teacher, expected, atol=1e-5, rtol=0)
        fleet.backward(pull(*features.student.shape, step))


def test_clients_without_a_teacher_label_with_their_student() -> None:
    model = split_model("cnn")
    fleet = make_fleet(model, settings())
    other = {name: tensor + 0.01 for name, tensor in model.bottom.state_dict().items()}
    plan = SplitRound(
        0, ACTIVE, STEPS, 0.05, model.bottom.state_dict(), other, teacher_for=frozenset({2})
    )
    fleet.start_round(plan)
    taught = copy.deepcopy(model.bottom)
    taught.load_state_dict(other)
    for step in range(STEPS):
        weak = fleet.block.batches.get("weak").split(BATCH)
        expected = [
            fleet.block._students.modules[0](weak[0]),
            taught(weak[1]),
            fleet.block._students.modules[2](weak[2]),
        ]
        features = fleet.forward()
        torch.testing.assert_close(features.teacher, torch.cat(expected), atol=1e-5, rtol=0)
        fleet.backward(pull(*features.student.shape, step))
    fleet.finish_round()
    counted = fleet.traffic.counts
    assert [counted["teacher", "down", client] > 0 for client in ACTIVE] == [False, True, False]


def test_client_teachers_use_batch_statistics_but_no_dropout() -> None:
    model = split_model("dropout")
    fleet = make_fleet(model, settings())
    start(fleet, model)
    teacher = copy.deepcopy(model.bottom).eval()
    for layer in batchnorms(teacher):
        layer.train()
    expected = torch.cat(
        [teacher(images) for images in fleet.block.batches.get("weak").split(BATCH)]
    )
    torch.testing.assert_close(fleet.forward().teacher, expected, atol=1e-5, rtol=0)


def test_rounds_repeat_on_a_fresh_fleet() -> None:
    """Nothing a round draws depends on the rounds before it, dropout on the clients included."""
    model = split_model("dropout")
    one, other = make_fleet(model, settings()), make_fleet(model, settings())
    do_round(one, model, 0)
    later = do_round(one, model, 1)
    fresh = do_round(other, model, 1)
    assert all(torch.equal(later[name], fresh[name]) for name in later)
    assert largest_difference(later, do_round(other, model, 2)) > 0


def test_clients_draw_their_own_dropout() -> None:
    model = split_model("dropout")
    fleet = make_fleet(model, settings())
    start(fleet, model)
    masks = [(rows == 0) for rows in fleet.forward().student.split(BATCH)]
    assert not torch.equal(masks[0], masks[1])


# --- the stack ---------------------------------------------------------------------------------------


def test_stack_is_modules_whose_weights_lie_together() -> None:
    template = bn_model().train()
    stack = Stack(template, 3)
    images = torch.rand(12, 1, 16, 16)
    adopt_layers(template)
    for module in stack.modules:
        module.eval()
    expected = copy.deepcopy(template).eval()(images)
    torch.testing.assert_close(
        stack(images, Hardware("cpu").streams.side_by_side), expected, atol=1e-6, rtol=0
    )
    stack.tensors["0.weight"][1].zero_()
    assert not stack.modules[1].get_parameter("0.weight").any()
    assert stack.modules[0].get_parameter("0.weight").any()
    changed = {name: tensor + 1 for name, tensor in template.state_dict().items()}
    stack.load(changed, slot=2)
    assert largest_difference(stack.modules[2].state_dict(), changed) == 0
    states = [module.state_dict() for module in stack.modules]
    assert largest_difference(stack.mean(), plain_mean(states)) < 1e-6
    assert largest_difference(mean_state(states), plain_mean(states)) < 1e-6


def test_counters_are_averaged_and_truncated() -> None:
    states = [{"n": torch.tensor(count)} for count in (4, 5, 5)]
    assert mean_state(states)["n"].dtype == torch.int64 and int(mean_state(states)["n"]) == 4
    stack = Stack(nn.BatchNorm1d(2), 3)
    stack.tensors["num_batches_tracked"].copy_(torch.tensor([4, 5, 5]))
    assert int(stack.mean()["num_batches_tracked"]) == 4


def test_stack_follows_slot_by_slot() -> None:
    one, other = Stack(bn_model(), 2, trainable=False), Stack(bn_model(), 2)
    for tensor in other.tensors.values():
        tensor.add_(1)
    expected = [copy.deepcopy(module) for module in one.modules]
    follow(expected[0], other.modules[0], 0.9)
    follow(expected[1], other.modules[1], 0.0)
    one.follow(other, torch.tensor([0.9, 0.0]))
    for module, plain in zip(one.modules, expected, strict=True):
        assert largest_difference(module.state_dict(), plain.state_dict()) < 1e-6


# --- bytes -------------------------------------------------------------------------------------------


def size(shape: tuple[int, ...], codec: str) -> int:
    """Bytes of one float tensor, counted by hand."""
    if codec == "int8" and len(shape) > 1 and prod(shape[1:]) > 1:
        return prod(shape) + 4 * shape[0]
    if codec == "int4" and len(shape) > 1 and prod(shape[1:]) > 1:
        return shape[0] * (-(-prod(shape[1:]) // 2) + 2 * -(-prod(shape[1:]) // 32))
    return prod(shape) * {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 4, "int4": 4}[codec]


def model_size(module: nn.Module, codec: str) -> int:
    return sum(
        size(tuple(tensor.shape), codec) if tensor.is_floating_point() else 8 * tensor.numel()
        for tensor in module.state_dict().values()
    )


@pytest.mark.parametrize("name", ["cnn", "bn"])
@pytest.mark.parametrize("codec", ["fp16", "int8", "int4"])
def test_traffic_with_codecs(name: str, codec: str) -> None:
    model = split_model(name)
    kinds = ("student_features", "gradients", "models")
    fleet = make_fleet(model, settings(*(f"wire.{kind}={codec}" for kind in kinds)))
    do_round(fleet, model)
    shape = (BATCH, model.features)
    bottom = 3 * model_size(model.bottom, codec)
    coded, plain = (3 * STEPS * size(shape, kind) for kind in (codec, "fp32"))
    assert fleet.traffic.by_kind() == {
        "features_up": coded + plain,
        "gradients_down": coded,
        "model_down": bottom,
        "model_up": bottom,
        "teacher_down": bottom,
    }


def test_traffic_state_round_trip() -> None:
    traffic, other = Traffic(), Traffic()
    traffic.add("model", "down", 3, 10)
    traffic.add("model", "down", 3, 5)
    traffic.add("features", "up", 12, 7)
    other.add("model", "up", 1, 1)
    other.load_state_dict(traffic.state_dict())
    assert other.counts == traffic.counts and other.total() == 22
