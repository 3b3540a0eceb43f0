"""Check the types of what `train` and `resume` are given, and of torch's new numbers; leave torch's modes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from semisfl.data.partition import Partition
from semisfl.data.sources import Dataset
from semisfl.settings.config import Config

EVENTS = ("on_round", "on_evaluation", "on_checkpoint")


@contextmanager
def usual_modes() -> Iterator[None]:
    """Train as usual inside `torch.no_grad`, `torch.inference_mode` and on another default device."""
    other = torch.get_default_device().type != "cpu"
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.device("cpu") if other else nullcontext(),
    ):
        yield


def check_config(config: Any) -> None:
    """Raise TypeError for a configuration that is not parsed yet."""
    if not isinstance(config, Config):
        raise TypeError(
            f"config is a {type(config).__name__}; it must be what semisfl.parse or semisfl.preset returns"
        )


def check_means(data: Any, partition: Any, callbacks: Any) -> None:
    """Raise TypeError for an argument of the wrong type, and for another default type of torch's numbers."""
    if (kind := torch.get_default_dtype()) != torch.float32:
        raise TypeError(
            f"torch's default type is {kind}, and models are trained in torch.float32; call "
            "torch.set_default_dtype(torch.float32) first"
        )
    if data is not None and not isinstance(data, Dataset):
        raise TypeError(
            f"data is a {type(data).__name__}; it must be a semisfl.Dataset (set data.name to use known images)"
        )
    if partition is not None and not isinstance(partition, Partition):
        raise TypeError(
            f"partition is a {type(partition).__name__}; it must be a semisfl.Partition(labeled=..., clients=...)"
        )
    if not isinstance(callbacks, Sequence):
        raise TypeError(
            f"callbacks is a {type(callbacks).__name__}; it must be a list, e.g. [MyCallback()]"
        )
    for one in callbacks:
        if isinstance(one, type) or not all(hasattr(one, event) for event in EVENTS):
            what = (
                f"the class {one.__name__}" if isinstance(one, type) else f"a {type(one).__name__}"
            )
            raise TypeError(
                f"callbacks holds {what}; it must hold objects of classes derived from semisfl.Callback"
            )
