"""The teacher's moving average: warm-up, buffers, counters."""

import copy

import pytest
import torch
from torch import nn

from semisfl.algorithm.teacher import Teacher
from semisfl.engine.weights import Weights
from semisfl.models.split import split
from tests.twin import bn_model


class Number(nn.Module):
    """One weight, so that averages can be followed by hand."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([value]))

    def set(self, value: float) -> None:
        self.weight.data.fill_(value)


def weight(teacher: Teacher) -> float:
    return float(teacher.model.get_parameter("weight"))


def test_starts_as_a_copy_that_is_never_trained() -> None:
    student = Number(3.0)
    teacher = Teacher(student, 0.99)
    assert weight(teacher) == 3.0
    assert not teacher.model.training and not any(
        p.requires_grad for p in teacher.model.parameters()
    )
    student.set(5.0)
    assert weight(teacher) == 3.0


def test_warm_up_by_hand() -> None:
    student = Number(0.0)
    teacher = Teacher(student, 0.99)
    student.set(1.0)
    teacher.update()  # t = 1: m = 1/2
    assert weight(teacher) == pytest.approx(1 / 2)
    student.set(4.0)
    teacher.update()  # t = 2: m = 2/3
    assert weight(teacher) == pytest.approx(2 / 3 * 1 / 2 + 1 / 3 * 4)


def test_warm_up_ends_at_the_99th_update() -> None:
    student = Number(0.0)
    teacher = Teacher(student, 0.99)
    for update in range(1, 130):
        student.set(0.0)
        teacher.model.get_parameter("weight").fill_(1.0)
        teacher.update()
        expected = min(1 - 1 / (update + 1), 0.99)
        assert weight(teacher) == pytest.approx(expected, abs=1e-6), update
        assert (expected == 0.99) == (update >= 99)


def test_without_warm_up_the_decay_holds_from_the_start() -> None:
    student = Number(0.0)
    teacher = Teacher(student, 0.9, warmup=False)
    student.set(1.0)
    teacher.update()
    assert weight(teacher) == pytest.approx(0.1)


def test_batchnorm_statistics_are_averaged_and_the_counter_copied() -> None:
    student = split(bn_model(), (1, 16, 16), projection=4)
    teacher = Teacher(student, 0.99)
    before = copy.deepcopy(teacher.model.state_dict())
    student.train()
    for number in range(3):
        student(torch.randn(8, 1, 16, 16, generator=torch.Generator().manual_seed(number)))
    teacher.update()
    after, source = teacher.model.state_dict(), student.state_dict()
    statistics = [name for name in after if "running" in name]
    counters = [name for name in after if "num_batches" in name]
    assert len(statistics) == 6 and len(counters) == 3
    for name in statistics:
        torch.testing.assert_close(after[name], (before[name] + source[name]) / 2)
        assert not torch.equal(after[name], before[name])
    assert all(int(after[name]) == 3 for name in counters)


def test_covers_bottom_top_and_projector() -> None:
    student = split(bn_model(), (1, 16, 16), projection=4)
    teacher = Teacher(student, 0.99)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(1.0)
    before = copy.deepcopy(teacher.model.state_dict())
    teacher.update()
    for name, _ in student.named_parameters():
        torch.testing.assert_close(teacher.model.state_dict()[name], before[name] + 0.5)


def test_state_round_trip_keeps_the_warm_up_going() -> None:
    student, same = Number(0.0), Number(0.0)
    teacher, other = Teacher(student, 0.99), Teacher(same, 0.99)
    student.set(1.0)
    same.set(1.0)
    teacher.update()
    other.load_state_dict(copy.deepcopy(teacher.state_dict()))
    teacher.update()
    other.update()
    assert weight(teacher) == weight(other) == pytest.approx(2 / 3 * 1 / 2 + 1 / 3)


def test_a_teacher_notices_that_the_students_weights_were_moved() -> None:
    student = Number(0.0)
    teacher = Teacher(student, 0.99)
    Weights(student)
    with pytest.raises(AssertionError, match="moved"):
        teacher.update()
