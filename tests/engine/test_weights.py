"""Weights in one tensor, and working copies of them in another precision."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from semisfl.algorithm.teacher import Teacher
from semisfl.engine.sgd import SGD
from semisfl.engine.weights import ALIGNMENT, Weights, clone, follow, weights_of
from semisfl.models.stack import Stack
from semisfl.settings.run import OptimizerConfig
from tests.toy import residual_network
from tests.twin import bn_model


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 36, 7), nn.Linear(7, 3)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [model, bn_model, residual_network])
def test_state_dicts_hold_full_precision_weights(
    make: type[nn.Sequential], dtype: torch.dtype
) -> None:
    plain = make()
    module = copy.deepcopy(plain)
    weights = Weights(module, dtype)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor), name
    other = {
        k: torch.randn_like(v) if v.is_floating_point() else v
        for k, v in plain.state_dict().items()
    }
    module.load_state_dict(other)
    for name, tensor in other.items():
        assert torch.equal(module.state_dict()[name], tensor), name
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter.detach(), other[name].to(parameter.dtype)), name
    assert (weights.work is not None) == (dtype is torch.bfloat16)


def test_only_convolutions_and_linear_layers_compute_on_the_copy() -> None:
    module = bn_model()
    Weights(module, torch.bfloat16)
    for layer in module:
        for parameter in layer.parameters():
            cast = isinstance(layer, nn.Conv2d | nn.Linear)
            assert parameter.dtype is (torch.bfloat16 if cast else torch.float32)


def test_every_tensor_starts_aligned() -> None:
    module = model()
    weights = Weights(module, torch.bfloat16)
    for parameter in module.parameters():
        assert parameter.storage_offset() % ALIGNMENT == 0
    assert weights.work is not None and len(weights.work) % ALIGNMENT == 0


@pytest.mark.parametrize("make", [model, residual_network])
def test_a_clone_is_full_precision_and_apart(make: type[nn.Sequential]) -> None:
    module = make()
    before = copy.deepcopy(module.state_dict())
    own = Weights(module, torch.bfloat16)
    copied = clone(module)
    assert weights_of(module) is own
    assert all(parameter.dtype is torch.float32 for parameter in copied.parameters())
    own.master.zero_()
    own.refresh()
    assert all(torch.equal(tensor, before[name]) for name, tensor in copied.state_dict().items())
    assert not any(parameter.any() for parameter in module.parameters())


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_step_through_the_masters_is_a_step_of_plain_sgd(
    momentum: float, clip: float | None
) -> None:
    """Gradients are given, so that rounding in the forward pass does not blur the comparison."""
    config = OptimizerConfig(momentum=momentum, weight_decay=0.01)
    plain, module = model(), model()
    Weights(module, torch.bfloat16)
    ours, theirs = SGD(module.parameters(), config), SGD(plain.parameters(), config)
    for sgd in (ours, theirs):
        sgd.restart(0.1)
    for _ in range(4):
        gradients = [torch.randn_like(p).bfloat16() for p in plain.parameters()]
        ours.apply(gradients, clip)
        theirs.apply([gradient.float() for gradient in gradients], clip)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], tensor, rtol=1e-5, atol=1e-5)
        assert torch.equal(module.get_parameter(name), module.state_dict()[name].bfloat16())


def test_a_part_of_the_weights_can_be_stepped_alone() -> None:
    module = model()
    Weights(module, torch.bfloat16)
    before = copy.deepcopy(module.state_dict())
    sgd = SGD([*module[3].parameters(), *module[4].parameters()], OptimizerConfig())
    sgd.restart(0.1)
    sgd.descend(module(torch.randn(2, 3, 8, 8).bfloat16()).float().square().mean())
    changed = {
        name
        for name, tensor in module.state_dict().items()
        if not torch.equal(tensor, before[name])
    }
    assert changed == {"3.weight", "3.bias", "4.weight", "4.bias"}


def test_a_teacher_of_working_copies_follows_the_masters() -> None:
    student = bn_model()
    source = Weights(student, torch.bfloat16)
    teacher = Teacher(student, 0.99)
    start = copy.deepcopy(teacher.model.state_dict())
    source.master.add_(1)
    source.refresh()
    teacher.update()
    for name, tensor in teacher.model.state_dict().items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, start[name] + 0.5)
    for name, parameter in teacher.model.named_parameters():
        assert torch.equal(parameter, teacher.model.state_dict()[name].to(parameter.dtype))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
def test_a_layer_that_is_used_twice_follows_once(stacked: bool, flat: bool) -> None:
    linear, norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
    teacher = nn.Sequential(linear, norm, nn.ReLU(), linear, norm)
    student = copy.deepcopy(teacher)
    with torch.no_grad():
        for tensor in (*student.parameters(), student[1].running_mean):
            tensor.add_(1)
    expected = {
        name: 0.75 * mine + 0.25 * student.state_dict()[name]
        for name, mine in teacher.state_dict().items()
        if mine.is_floating_point()
    }
    if stacked:
        dtype = torch.bfloat16 if flat else torch.float32
        teachers, students = (Stack(one, 2, dtype=dtype) for one in (teacher, student))
        teachers.follow(students, torch.tensor([0.75, 0.75]))
        got = teachers.state(1)
    else:
        if flat:
            weights_of(teacher), weights_of(student)
        follow(teacher, student, torch.tensor(0.75))
        got = teacher.state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, msg=name)


def test_steps_taken_as_gradients_come_are_the_same_steps() -> None:
    """As on a GPU, where a parameter is stepped, and its teacher moved, beside the backward pass."""
    used: list[torch.Tensor] = []

    class OneStream:
        @contextmanager
        def side(self, *tensors: torch.Tensor) -> Iterator[None]:
            used.extend(tensors)
            yield

    def start() -> tuple[nn.Sequential, SGD, Teacher[nn.Sequential]]:
        torch.manual_seed(0)
        student = nn.Sequential(bn_model(), nn.Linear(7, 7))
        student[0][11].p = 0.0  # dropout would draw differently for each
        Weights(student, torch.bfloat16)
        teacher = Teacher(student, 0.9)
        sgd = SGD(student.parameters(), OptimizerConfig(), OneStream())  # type: ignore[arg-type]
        teacher.pair_with(sgd)
        sgd.restart(0.1)
        return student, sgd, teacher

    (late, late_sgd, late_teacher), (early, early_sgd, early_teacher) = start(), start()
    for _ in range(3):
        images = torch.randn(4, 1, 16, 16)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            # The last layer is not used: it has no gradient, but decay and momentum.
            losses = [student[0](images).float().square().mean() for student in (late, early)]
        late_sgd.descend(losses[0])
        late_teacher.update()
        early_sgd._descend_early(OneStream(), losses[1], early_sgd.parameters, None)  # type: ignore[arg-type]
        early_teacher.update()
    assert len(used) == 3 * sum(hasattr(p, "home") for p in early.parameters())
    for late_one, early_one in ((late, early), (late_teacher.model, early_teacher.model)):
        for name, tensor in late_one.state_dict().items():
            torch.testing.assert_close(early_one.state_dict()[name], tensor)
    assert late_teacher.updates == early_teacher.updates == 3
    with pytest.raises(AssertionError):
        early_teacher._average.begin(early_sgd._homes[1:], OneStream().side)


@pytest.mark.parametrize("slots", [1, 3])
def test_a_step_of_a_stack_is_a_step_of_each_slot(slots: int) -> None:
    config = OptimizerConfig(weight_decay=0.01)
    stack = Stack(model(), slots, dtype=torch.bfloat16)
    rows = zip(*(module.parameters() for module in stack.modules), strict=True)
    together = SGD([Stack.rows_of(row) for row in rows], config)
    plain = [model() for _ in range(slots)]
    alone = [SGD(module.parameters(), config) for module in plain]
    for sgd in (together, *alone):
        sgd.restart(0.1)
    for step in range(3):
        gradients = [torch.randn(slots, *p.shape).bfloat16() for p in plain[0].parameters()]
        # A parameter that a step does not use has no gradient; its momentum and decay go on.
        missing = 1 if step == 1 else None
        together.apply([None if i == missing else s for i, s in enumerate(gradients)])
        for slot, sgd in enumerate(alone):
            mine = [s[slot].float() for s in gradients]
            if missing is not None:
                mine[missing] = torch.zeros_like(mine[missing])
            sgd.apply(mine)
    for slot, module in enumerate(plain):
        for name, tensor in module.state_dict().items():
            torch.testing.assert_close(stack.tensors[name][slot], tensor, rtol=1e-5, atol=1e-5)
