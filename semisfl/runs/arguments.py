"""Check the arguments of `train` and `resume`, and train in torch's usual modes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from semisfl.data.dataset import Dataset
from semisfl.data.partition import Partition
from semisfl.settings.config import Config
from semisfl.stopping import StopFlag

EVENTS = ("on_round", "on_evaluation", "on_checkpoint")
_THREADS: list[int] = []
"""torch's number of threads in each run of this program that is under way."""


@contextmanager
def usual_modes() -> Iterator[None]:
    """Train in torch's usual modes, whatever the caller has set: with gradients, on the CPU, with all threads."""
    other = torch.get_default_device().type != "cpu"
    # A run sets one thread while its clients have a core each, and torch gives that number to every Python thread
    # that begins meanwhile.
    if torch.get_num_threads() == 1 and _THREADS:
        torch.set_num_threads(max(_THREADS))
    threads = torch.get_num_threads()
    _THREADS.append(threads)
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.device("cpu") if other else nullcontext(),
        ):
            yield
    finally:
        _THREADS.remove(threads)


def check_config(config: Any) -> None:
    """Raise TypeError for a configuration that is not parsed yet."""
    if not isinstance(config, Config):
        raise TypeError(
            f"config is a {type(config).__name__}; it must be what semisfl.parse or semisfl.preset returns"
        )


def check_arguments(
    data: Any, partition: Any, device: Any, callbacks: Any, sinks: Any, observe: Any, stop: Any
) -> None:
    """Raise TypeError for an argument of the wrong type, and if torch's default number type is not float32."""
    if (kind := torch.get_default_dtype()) != torch.float32:
        raise TypeError(
            f"torch's default type is {kind}, and models are trained in torch.float32; call "
            "torch.set_default_dtype(torch.float32) first"
        )
    for name, value, right, fix in (
        ("data", data, Dataset | None, "a semisfl.Dataset (set data.name to use known images)"),
        ("partition", partition, Partition | None, "a semisfl.Partition(labeled=..., clients=...)"),
        ("device", device, str, "'auto', 'cpu', 'cuda' or 'cuda:N'"),
        ("stop", stop, StopFlag | None, "a semisfl.stopping.StopFlag (callbacks end a run, too)"),
    ):
        if not isinstance(value, right):
            raise TypeError(f"{name} is a {type(value).__name__}; it must be {fix}")
    if observe is not None and not callable(observe):
        raise TypeError(
            f"observe is a {type(observe).__name__}; it must be a function that takes the metrics of a round"
        )
    _check_list("callbacks", callbacks, EVENTS, "of classes derived from semisfl.Callback")
    # One that lacks a method is reported during the run, as one that fails.
    _check_list("sinks", sinks, (), "with start, write and close")


def _check_list(name: str, values: Any, methods: Sequence[str], what: str) -> None:
    """Raise TypeError unless ``values`` is a list of objects that have all ``methods``."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        one = f"My{name.title().removesuffix('s')}()"
        raise TypeError(f"{name} is a {type(values).__name__}; it must be a list, e.g. [{one}]")
    for value in values:
        is_class = isinstance(value, type)
        if is_class or isinstance(value, str) or not all(hasattr(value, one) for one in methods):
            kind = f"the class {value.__name__}" if is_class else f"a {type(value).__name__}"
            raise TypeError(f"{name} holds {kind}; it must hold objects {what}")
