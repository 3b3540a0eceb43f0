"""Check whether a round left the run in a state worth keeping."""

import logging
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from semisfl.fleet.yardstick import followed
from semisfl.methods.base import Method
from semisfl.metrics import MethodMetrics
from semisfl.runs import checkpoint
from semisfl.runs.checkpoint import CheckpointError

log = logging.getLogger(__name__)

JUMP = 10.0
"""Largest multiple of its usual value that a loss or a norm of weights may have."""
SMALLEST_LOSS = 10.0
"""Losses below this count as this: a small one may grow by more than JUMP without harm."""

Usual = Mapping[str, Mapping[str, float]]


class Health:
    """Compare each round with what was usual in the good ones before it."""

    def __init__(self, method: Method, usual: Usual | None = None) -> None:
        """Take ``usual``: the `state_dict` in the checkpoint that the run continues from."""
        self._method = method
        self._norms = {**_norms(method), **(usual["norms"] if usual else {})}
        self._losses: dict[str, float] = dict(usual["losses"]) if usual else {}

    def state_dict(self) -> dict[str, dict[str, float]]:
        return {"norms": self._norms, "losses": self._losses}

    def fault(self, metrics: MethodMetrics) -> str | None:
        """Return what is wrong with the round that has these metrics; None if it was good."""
        if not isinstance(metrics, MethodMetrics):
            raise ValueError(
                f"round() of {type(self._method).__name__} returned a {type(metrics).__name__}; it must return "
                "a semisfl.metrics.MethodMetrics"
            )
        for name, value in vars(metrics).items():
            if hasattr(value, "item") and not isinstance(value, float):  # of torch or numpy
                raise ValueError(
                    f"round() of {type(self._method).__name__} returned a {type(value).__name__} as {name}; metrics "
                    "are plain numbers: use .item()"
                )
        losses = {
            name: value
            for name, value in vars(metrics).items()
            if name.startswith("loss_") and value is not None
        }
        for name, value in losses.items():
            before = self._losses.get(name)
            most = sys.float_info.max if before is None else JUMP * max(before, SMALLEST_LOSS)
            if not value <= most:
                return f"{name} is {_against(value, most)}"
        norms = _norms(self._method)
        for name, norm in norms.items():
            most = JUMP * max(self._norms[name], 1.0)
            if not norm <= most:
                return f"the norm of the {name}'s weights is {_against(norm, most)}"
        self._norms, slow = followed(self._norms, norms), followed(self._losses, losses)
        # A loss falls as a model learns: what is usual falls with it, and rises slowly.
        self._losses = {name: min(slow[name], losses.get(name, slow[name])) for name in slow}
        return None


def _against(value: float, most: float) -> str:
    return f"{value:g}, above {most:g}" if math.isfinite(value) else f"{value:g}"


def _norms(method: Method) -> dict[str, float]:
    """Return the norm of every part (bottom, top, ...) of the tested models; NaN if a weight is NaN."""
    norms = {
        f"{name} {part}": torch.nn.utils.get_total_norm(weights)
        for name, model in method.tested().items()
        for part, module in model.named_children()
        if (weights := [parameter.detach() for parameter in module.parameters()])
    }
    # Read together, so that the device is waited for only once.
    return dict(zip(norms, torch.stack([*norms.values()]).tolist(), strict=True)) if norms else {}


def last_good(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the checkpoint to continue from: the latest, or the previous one if that cannot be used.

    Return None if there is no checkpoint yet. Raise `CheckpointError` if none of them can be used.
    """
    refused: CheckpointError | None = None
    for name in ("latest", "previous"):
        path = folder / f"{name}.safetensors"
        if not path.exists():
            continue
        try:
            state = checkpoint.read(path)
            if not finite(state["method"]):
                raise CheckpointError(f"checkpoint {path} holds NaN or Inf; use an older one")
        except CheckpointError as error:
            refused = refused or error
            continue
        if refused is not None:
            log.warning("%s", refused)
        return path, state
    if refused is not None:
        raise refused
    return None


def finite(state: Any) -> bool:
    """Return whether a state holds neither NaN nor Inf."""
    if isinstance(state, Tensor):
        return not state.is_floating_point() or bool(torch.isfinite(state).all())
    if isinstance(state, Mapping):
        return all(finite(value) for value in state.values())
    if isinstance(state, list | tuple):
        return all(finite(value) for value in state)
    return not isinstance(state, float) or math.isfinite(state)
