"""All weights of a module in one tensor, and a copy of them in the precision its layers compute in.

Averaging, moving averages and SGD then are single passes over memory, and nothing is cast twice.
``module.state_dict()`` and ``load_state_dict`` always speak of the full-precision weights.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from semisfl.engine.kernels import ema_step

Module = TypeVar("Module", bound=nn.Module)
State = dict[str, Tensor]
"""A state dict."""
CAST_LAYERS = (nn.Conv2d, nn.Linear)
ALIGNMENT = 64


class Unchanging(State):
    """A state whose tensors nobody writes to any more: whoever would copy it may keep it as it is."""


def as_view(flat: Tensor, shape: torch.Size) -> Tensor:
    """``flat`` shaped; convolution weights lie channels-last, as the kernels want them."""
    if len(shape) == 4:
        out, channels, height, width = shape
        return flat.unflatten(-1, (out, height, width, channels)).movedim(-1, -3)
    return flat.unflatten(-1, shape) if shape else flat.squeeze(-1)


def as_flat(tensor: Tensor) -> Tensor:
    """The values of ``tensor`` in the order `as_view` lays them out in."""
    return (tensor.movedim(-3, -1) if tensor.dim() >= 4 else tensor).reshape(-1)


def padded(tensor: Tensor) -> int:
    """Room for ``tensor`` such that the next one starts where matrix kernels like it."""
    return _aligned(tensor.numel())


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class Home(NamedTuple):
    """Where a working copy's values lie: ``rows`` stretches of ``size``, ``stride`` from start to start.

    A parameter is one row; one parameter of all the clients of a stack has a row for each.
    """

    weights: "Weights"
    start: int
    size: int
    rows: int = 1
    stride: int = 0

    @property
    def stop(self) -> int:
        """Where the next parameter of the same module may start."""
        return self.start + _aligned(self.size)

    def of(self, flat: Tensor) -> Tensor:
        """The rows in ``flat``, which is laid out as the weights are."""
        return flat.as_strided(
            (self.rows, self.size), (self.stride, 1), flat.storage_offset() + self.start
        )


class Weights:
    """Moves a module's floating-point parameters and buffers into ``master``.

    With a ``dtype`` other than float32 the parameters of convolutions and linear layers become
    views of ``work``, a copy of the head of ``master`` in that type; everything else stays a view
    of ``master``. Whoever writes to ``master`` calls `refresh`. ``copied``: the parameters that
    become views of ``work``, whatever ``dtype`` is.
    """

    base: Tensor | None = None
    """What is added to ``master`` in ``work``, if the layers compute with a sum."""

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype = torch.float32,
        copied: Sequence[nn.Parameter] = (),
    ) -> None:
        cast = copied or (_cast_parameters(module) if dtype != torch.float32 else [])
        known = {id(parameter) for parameter in cast}
        rest = [
            t
            for t in (*module.parameters(), *module.buffers())
            if t.is_floating_point() and id(t) not in known
        ]
        tensors = [*cast, *rest]
        device = tensors[0].device
        self.master = torch.zeros(sum(padded(t) for t in tensors), device=device)
        self.work = (
            torch.zeros(sum(padded(t) for t in cast), device=device, dtype=dtype) if cast else None
        )
        self.dtype = dtype
        start = 0
        for tensor in tensors:
            place = slice(start, start + tensor.numel())
            master = as_view(self.master[place], tensor.shape)
            master.copy_(tensor.data)
            if id(tensor) in known:
                assert self.work is not None
                tensor.data = as_view(self.work[place], tensor.shape)
                tensor.master = master  # type: ignore[attr-defined]
                tensor.home = Home(self, start, tensor.numel())  # type: ignore[attr-defined]
            else:
                tensor.data = master
            start += padded(tensor)
        for layer in module.modules():
            if any(id(parameter) in known for parameter in layer.parameters(recurse=False)):
                layer.register_state_dict_post_hook(_give_master)
                layer.register_load_state_dict_pre_hook(_take_master)
        module.weights = self  # type: ignore[assignment]
        self.refresh()

    def refresh(self) -> None:
        """Bring the working copy up to date."""
        if self.work is not None:
            values = self.master[: self.work.numel()]
            self.work.copy_(values if self.base is None else values + self.base)

    @torch.no_grad()
    def follow(self, source: "Weights", decay: Tensor) -> None:
        """master <- decay master + (1 - decay) source."""
        ema_step(self.master, source.master, self.work, decay)

    @property
    def uncopied(self) -> Tensor:
        """What of ``master`` has no working copy."""
        return self.master[0 if self.work is None else self.work.numel() :]


class MovingAverage:
    """``target`` <- decay target + (1 - decay) source, for weights laid out alike.

    An optimiser that steps the source may `begin` an update and move each of the target's values
    along with its step; `complete` then does what is left, and without a beginning everything.
    """

    def __init__(self, target: Weights, source: Weights, decay: Callable[[], Tensor]) -> None:
        """``decay`` is asked once per update."""
        self.target, self.source = target, source
        self._next_decay = decay
        self._decay: Tensor | None = None
        self._side: Callable[[], AbstractContextManager[None]] = nullcontext

    @torch.no_grad()
    def begin(
        self, stepped: Sequence[Home], side: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Every working copy of the source is about to be ``stepped``, within ``side``."""
        assert self._decay is None, "the update before was not completed"
        assert stepped[0].weights is self.source and stepped[0].start == 0
        assert self.source.work is not None and stepped[-1].stop == self.source.work.numel()
        self._side = side
        with side():
            self._decay = self._next_decay()

    def along(self, home: Home) -> tuple[Tensor, Tensor, Tensor]:
        """What moves along with ``home``: its values, their working copy, and the decay."""
        assert self.target.work is not None and self._decay is not None
        return home.of(self.target.master), home.of(self.target.work), self._decay

    @torch.no_grad()
    def complete(self) -> None:
        if self._decay is None:
            self.target.follow(self.source, self._next_decay())
            return
        rest, decay, self._decay = self.target.uncopied, self._decay, None
        if rest.numel():
            with self._side():
                rest.lerp_(self.source.uncopied, 1 - decay)


def batchnorms(module: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    return [
        layer for layer in module.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)
    ]


def _cast_parameters(module: nn.Module) -> list[nn.Parameter]:
    layers = [layer for layer in module.modules() if isinstance(layer, CAST_LAYERS)]
    return [parameter for layer in layers for parameter in layer.parameters(recurse=False)]


def _give_master(layer: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, parameter in layer._parameters.items():
        if parameter is not None and hasattr(parameter, "master"):
            state[prefix + name] = parameter.master


@torch.no_grad()
def _take_master(layer: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in layer._parameters.items():
        if parameter is not None and hasattr(parameter, "master") and prefix + name in state:
            parameter.master.copy_(state[prefix + name])


def weights_of(module: nn.Module) -> Weights:
    """The module's `Weights`, made in float32 if it has none yet."""
    return module.__dict__.get("weights") or Weights(module)


def clone(module: Module) -> Module:
    """A copy with full-precision parameters of its own, whatever the original computes in."""
    own = module.__dict__.pop("weights", None)
    # Dropout's generators stay the same objects: one that a captured graph uses must not be copied.
    values = [value for layer in module.modules() for value in vars(layer).values()]
    generators = {id(value): value for value in values if isinstance(value, torch.Generator)}
    try:
        copied = copy.deepcopy(module, generators)
    finally:
        if own is not None:
            module.weights = own
    for mine, theirs in zip(copied.parameters(), module.parameters(), strict=True):
        if hasattr(theirs, "master"):
            mine.data = theirs.master.clone()
    return copied
