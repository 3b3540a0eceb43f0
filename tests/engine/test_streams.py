"""Independent calls on a CPU: a core each."""

import threading
from collections.abc import Iterator

import pytest
import torch

from semisfl.engine.hardware import Hardware


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def seen() -> tuple[int, bool]:
    """Threads that an operation here has, and whether it is where the calls were made."""
    return torch.get_num_threads(), threading.current_thread() is threading.main_thread()


@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_calls_have_a_core_each_but_one_that_is_left_over(two_threads: None, count: int) -> None:
    streams = Hardware("cpu").streams
    with streams.a_core_each():
        result = streams.side_by_side([seen] * count)
        assert torch.get_num_threads() == 1
    alone = [(2, True)] * (count % 2)
    assert result == [(1, False)] * (count - len(alone)) + alone
    assert torch.get_num_threads() == 2


def test_one_that_fails_leaves_the_threads_as_they_were(two_threads: None) -> None:
    def fail() -> None:
        raise RuntimeError("here")

    streams = Hardware("cpu").streams
    with pytest.raises(RuntimeError, match="here"), streams.a_core_each():
        streams.side_by_side([seen, seen, fail])
    assert torch.get_num_threads() == 2


def test_two_calls_together_run_in_order_on_a_cpu() -> None:
    order: list[str] = []
    both = Hardware("cpu").streams.together(
        lambda: order.append("first") or 1, lambda: order.append("second") or 2
    )
    assert both == (1, 2) and order == ["first", "second"]


def test_a_meter_sums_what_is_there_and_starts_again() -> None:
    meter = Hardware("cpu").meter()
    for step in (1.0, 2.0):
        meter.add(
            lambda step=step: {"counts": torch.tensor([step, 10.0])},
            loss=torch.tensor(step),
            missing=None,
        )
    assert meter.read() == {"loss": 3.0, "counts": [3.0, 20.0]}
    assert meter.read() == {"loss": 0.0, "counts": [0.0, 0.0]}
