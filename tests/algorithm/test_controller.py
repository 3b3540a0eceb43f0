"""Test how the controller adapts the supervised steps, on hand-made losses."""

import json
from collections.abc import Callable

import pytest

from semisfl.algorithm.controller import Controller
from semisfl.settings.run import ControllerConfig

CIFAR = 4000 / 50000
Series = Callable[[int], tuple[float, float]]


def controller(
    kind: str = "normalised", steps: int = 100, share: float = CIFAR, **settings: object
) -> Controller:
    return Controller(
        ControllerConfig.model_validate({"kind": kind, **settings}), steps, 50, lambda: share
    )


def feed(subject: Controller, rounds: range, series: Series, lr: float = 0.02) -> list[int]:
    steps = []
    for index in rounds:
        subject.observe(*series(index), lr)
        steps.append(subject.supervised_steps)
    return steps


def semi_falls(index: int) -> tuple[float, float]:
    return 1.0, 10.0 - 0.01 * index


def supervised_falls(index: int) -> tuple[float, float]:
    return 10.0 - 0.01 * index, 1.0


def test_cifar_numbers() -> None:
    """100 -> 67 -> 45 -> 32, one decision every 100 rounds, and 32 is the floor."""
    steps = feed(controller(), range(500), semi_falls)
    assert steps[98:100] == [100, 67]
    assert steps[198:200] == [67, 45]
    assert steps[298:300] == [45, 32]
    assert steps[399] == steps[499] == 32


@pytest.mark.parametrize(
    ("labeled", "total", "floor"), [(1000, 73257, 5), (4000, 50000, 32), (5000, 105000, 19)]
)
@pytest.mark.parametrize("kind", ["normalised", "raw"])
def test_floors_of_the_papers_data_sets(labeled: int, total: int, floor: int, kind: str) -> None:
    subject = controller(kind, share=labeled / total)
    assert feed(subject, range(1500), semi_falls)[-1] == floor


def test_supervised_loss_falling_faster_changes_nothing() -> None:
    for kind in ("normalised", "raw"):
        assert set(feed(controller(kind), range(400), supervised_falls)) == {100}


def test_first_decision_has_nine_differences_later_ones_ten() -> None:
    """Windows are ten rounds. The semi-supervised loss falls over chosen windows only."""

    def falling(*windows: int) -> Series:
        # Falls between window n - 1 and n for n in `windows`, each mean lower by 1.
        return lambda index: (1.0, 100.0 - sum(index // 10 >= window for window in windows))

    first = controller()
    feed(first, range(100), falling(1, 2, 3, 4))  # 4 of 9
    assert first.semi_faster_share == pytest.approx(4 / 9) and first.supervised_steps == 100
    first = controller()
    feed(first, range(100), falling(1, 2, 3, 4, 5))  # 5 of 9
    assert first.semi_faster_share == pytest.approx(5 / 9) and first.supervised_steps == 67
    later = controller()
    # The second decision looks at windows 9 to 19: ten differences, the first into window 10.
    feed(later, range(200), falling(9, 10, 12, 14, 16, 18))
    assert later.semi_faster_share == pytest.approx(5 / 10) and later.supervised_steps == 67
    later = controller()
    feed(later, range(200), falling(9, 12, 14, 16, 18))
    assert later.semi_faster_share == pytest.approx(4 / 10) and later.supervised_steps == 100


def test_normalised_divides_by_rate_and_by_steps() -> None:
    """Both losses fall alike; twice the steps make the supervised one the slower a step."""

    def alike(index: int) -> tuple[float, float]:
        return 10.0 - 0.001 * index, 10.0 - 0.001 * index

    assert feed(controller(steps=100), range(100), alike)[-1] == 67
    # With half as many supervised steps as cross-entity ones it is the faster a step.
    assert feed(controller(steps=25, min_steps_factor=0.0), range(100), alike)[-1] == 25
    assert feed(controller("raw", steps=100), range(100), alike)[-1] == 100

    # 3e-7 a round and step: below the margin of 1e-5 at a large learning rate, above at a small one.
    def slowly(index: int) -> tuple[float, float]:
        return 1.0, 10.0 - 1e-5 * index

    fall = 10 * 1e-5 / 50
    assert fall / 0.5 < 1e-5 < fall / 0.02
    assert feed(controller(), range(100), slowly, lr=0.5)[-1] == 100
    assert feed(controller(), range(100), slowly, lr=0.02)[-1] == 67


@pytest.mark.parametrize("rates", [(1.0, 1e6), (1e6, 1.0)])
def test_a_difference_is_divided_by_the_rate_of_its_first_window(
    rates: tuple[float, float],
) -> None:
    """The loss falls once, from the first window to the second, with one rate each."""
    subject = controller(period=2)
    for index in range(2):
        subject.observe(1.0, 10.0 - index, rates[index])
    # 1 / rate / 50 steps is above the margin of 1e-5 if the first window's rate is the small one.
    assert subject.semi_faster_share == float(rates[0] == 1.0)


def test_a_difference_is_divided_by_the_steps_of_its_first_window() -> None:
    """K_s is lowered between two windows; the supervised loss falls by as much a step as before."""
    subject = controller(period=2, min_steps_factor=0.0)
    subject.supervised_steps = 100
    subject.observe(9.0, 9.0, 0.02)
    subject.supervised_steps = 10
    subject.observe(8.0, 8.4, 0.02)
    # 1 / 100 steps against 0.6 / 50: the semi-supervised loss fell faster; by 1 / 10 it did not.
    assert subject.semi_faster_share == 1.0


def test_raw_decides_every_round_with_floors() -> None:
    """100 -> 66 -> 44 -> 32: floor(K/1.5) once per round, from the first with ten differences on."""
    steps = feed(controller("raw"), range(115), semi_falls)
    assert set(steps[:109]) == {100}
    assert steps[108:115] == [100, 66, 44, 32, 32, 32, 32]


def test_raw_floors_what_a_division_leaves_just_below_a_whole_number() -> None:
    assert 33 / 1.1 < 30 and 8 * 50 * (290 / 1000) < 116
    assert feed(controller("raw", 33, 0.0, step_decay=1.1), range(110), semi_falls)[-1] == 30
    assert feed(controller("raw", 150, 290 / 1000), range(110), semi_falls)[-1] == 116


def test_raw_looks_at_ten_differences_in_every_round() -> None:
    """Between two whole windows the share does not change: a window is never forgotten early."""

    def some(index: int) -> tuple[float, float]:
        return 1.0, 100.0 - sum(index // 10 >= window for window in (12, 14, 16, 18))

    subject = controller("raw")
    shares = []
    for index in range(210):
        subject.observe(*some(index), 0.02)
        shares.append(subject.semi_faster_share)
    assert shares[199:209] == [pytest.approx(4 / 10)] * 10
    assert set(shares[109:119]) == {0.0}
    assert shares[129:139] == [pytest.approx(1 / 10)] * 10


def test_fixed_never_changes() -> None:
    assert set(feed(controller("fixed"), range(300), semi_falls)) == {100}


def test_never_rises_and_never_reaches_zero() -> None:
    # K_min = 400 here, above the 100 steps of the start.
    assert set(feed(controller(share=1.0), range(300), semi_falls)) == {100}
    assert feed(controller(share=0.0, steps=2), range(500), semi_falls)[-1] == 1
    assert feed(controller("raw", share=0.0, steps=2), range(500), semi_falls)[-1] == 1


@pytest.mark.parametrize("kind", ["normalised", "raw"])
def test_state_goes_through_json_and_continues_alike(kind: str) -> None:
    def uneven(index: int) -> tuple[float, float]:
        return 5.0 / (index + 1), 8.0 - 0.003 * index + 0.5 * (index * 7 % 11)

    uninterrupted = controller(kind)
    expected = feed(uninterrupted, range(330), uneven)
    for cut in (57, 100, 215):
        start = controller(kind)
        feed(start, range(cut), uneven)
        resumed = controller(kind)
        resumed.load_state_dict(json.loads(json.dumps(start.state_dict())))
        assert feed(resumed, range(cut, 330), uneven) == expected[cut:]
        assert resumed.state_dict() == uninterrupted.state_dict()
