"""Keep all weights of a module in one tensor, with a working copy in the precision its layers compute in.

Averages, moving averages and SGD are then single passes over memory, and nothing is cast twice.
``module.state_dict()`` and ``load_state_dict`` always read and write the full-precision weights.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from semisfl.engine.kernels import ema_step

Module = TypeVar("Module", bound=nn.Module)
State = dict[str, Tensor]
"""A state dict."""
CAST_LAYERS = (nn.Conv2d, nn.Linear)
ALIGNMENT = 64


class Unchanging(State):
    """A state whose tensors are no longer written to, so that nobody needs to copy it."""


def as_view(flat: Tensor, shape: torch.Size) -> Tensor:
    """Return ``flat`` in this shape; convolution weights are stored channels-last, as the kernels need them."""
    if len(shape) == 4:
        out, channels, height, width = shape
        return flat.unflatten(-1, (out, height, width, channels)).movedim(-1, -3)
    return flat.unflatten(-1, shape) if shape else flat.squeeze(-1)


def as_flat(tensor: Tensor) -> Tensor:
    """Return the values of ``tensor`` in the order in which `as_view` reads them, as one dimension."""
    return (tensor.movedim(-3, -1) if tensor.dim() >= 4 else tensor).reshape(-1)


def _aligned(size: int) -> int:
    """Return a number of values with padding, so that the next tensor starts aligned."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Home(NamedTuple):
    """The place of a parameter's working copy: ``rows`` of ``size`` values, one every ``stride`` values.

    A parameter of one module has one row; a parameter of a stack of clients has one per client.
    """

    weights: "Weights"
    start: int
    size: int
    rows: int = 1
    stride: int = 0

    @property
    def stop(self) -> int:
        """Return where the next parameter of the same module may start."""
        return self.start + _aligned(self.size)

    def of(self, flat: Tensor) -> Tensor:
        """Return these rows [rows, size] of ``flat``, which has the layout of the weights."""
        return flat.as_strided(
            (self.rows, self.size), (self.stride, 1), flat.storage_offset() + self.start
        )


class Weights:
    """Move a module's floating-point parameters and buffers into ``master``.

    With a ``dtype`` other than float32 the parameters of convolutions and linear layers become views
    of ``work``, a copy of the first part of ``master`` in that type. Everything else becomes a view
    of ``master``. Code that writes to ``master`` calls `refresh` afterwards. ``copied``: the
    parameters that become views of ``work`` for every ``dtype``.
    """

    base: Tensor | None = None
    """Added to ``master`` in ``work``, where the layers compute with a sum."""

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
        self.master = torch.zeros(sum(_aligned(t.numel()) for t in tensors), device=device)
        self.work = (
            torch.zeros(sum(_aligned(t.numel()) for t in cast), device=device, dtype=dtype)
            if cast
            else None
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
            start += _aligned(tensor.numel())
        for layer in module.modules():
            if any(id(parameter) in known for parameter in layer.parameters(recurse=False)):
                layer.register_state_dict_post_hook(_give_master)
                layer.register_load_state_dict_pre_hook(_take_master)
        module.weights = self  # type: ignore[assignment]
        self.refresh()

    def refresh(self) -> None:
        """Copy ``master`` to the working copy."""
        if self.work is not None:
            values = self.master[: self.work.numel()]
            self.work.copy_(values if self.base is None else values + self.base)

    @torch.no_grad()
    def follow(self, source: "Weights", decay: Tensor) -> None:
        """Set master <- decay master + (1 - decay) source."""
        ema_step(self.master, source.master, self.work, decay)

    @property
    def uncopied(self) -> Tensor:
        """Return the part of ``master`` that has no working copy."""
        return self.master[0 if self.work is None else self.work.numel() :]


class MovingAverage(Generic[Module]):
    """A copy of ``module`` that follows it: copy <- decay copy + (1 - decay) module.

    Buffers are averaged with the weights; integer counters are copied. An optimiser of the module
    may `begin` an update and move each of the copy's values together with its own step; `update`
    then does the rest, and everything if nothing was begun.
    """

    def __init__(self, module: Module, decay: Callable[[], Tensor]) -> None:
        """Copy ``module``; each update calls ``decay`` once for its decay, a scalar tensor in 0..1."""
        self.model: Module = clone(module).eval().requires_grad_(False)
        self._module = module
        self.source = weights_of(module)
        self.target = Weights(self.model, self.source.dtype)
        self._counters = [
            (mine, theirs)
            for mine, theirs in zip(self.model.buffers(), module.buffers(), strict=True)
            if not mine.is_floating_point()
        ]
        self._next_decay = decay
        self._decay: Tensor | None = None
        self._side: Callable[[], AbstractContextManager[None]] = nullcontext

    @torch.no_grad()
    def begin(
        self, stepped: Sequence[Home], side: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Begin an update: every working copy of the module is about to be ``stepped``, within ``side``."""
        assert self._decay is None, "the update before was not completed"
        assert stepped[0].weights is self.source and stepped[0].start == 0
        assert self.source.work is not None and stepped[-1].stop == self.source.work.numel()
        self._side = side
        with side():
            self._decay = self._next_decay()

    def along(self, home: Home) -> tuple[Tensor, Tensor, Tensor]:
        """Return what moves with the step of ``home``: the copy's values, their working copy, the decay."""
        assert self.target.work is not None and self._decay is not None
        return home.of(self.target.master), home.of(self.target.work), self._decay

    @torch.no_grad()
    def update(self) -> None:
        """Complete the update that was begun, or do all of it."""
        assert weights_of(self._module) is self.source, "the module's weights moved"
        if self._decay is None:
            self.target.follow(self.source, self._next_decay())
        else:
            rest, decay, self._decay = self.target.uncopied, self._decay, None
            if rest.numel():
                with self._side():
                    rest.lerp_(self.source.uncopied, 1 - decay)
        for mine, theirs in self._counters:
            mine.copy_(theirs)


@torch.no_grad()
def follow(target: nn.Module, source: nn.Module, decay: Tensor) -> None:
    """Set target <- decay target + (1 - decay) source, buffers included; counters are copied."""
    weights_of(target).follow(weights_of(source), decay)
    for mine, theirs in zip(target.buffers(), source.buffers(), strict=True):
        if not mine.is_floating_point():
            mine.copy_(theirs)


def distinct_names(module: nn.Module) -> set[str]:
    """Return one name of each of the module's tensors: in its state, a layer that is used twice has two."""
    return {name for name, _ in (*module.named_parameters(), *module.named_buffers())}


def _cast_parameters(module: nn.Module) -> list[nn.Parameter]:
    layers = [layer for layer in module.modules() if isinstance(layer, CAST_LAYERS)]
    return [parameter for layer in layers for parameter in layer.parameters(recurse=False)]


def _give_master(layer: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Put full-precision values into a state dict, in place of a working copy's."""
    for name, parameter in layer._parameters.items():
        if parameter is not None and hasattr(parameter, "master"):
            state[prefix + name] = parameter.master


@torch.no_grad()
def _take_master(layer: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Load full-precision values from a state dict; PyTorch then loads the working copy itself."""
    for name, parameter in layer._parameters.items():
        if parameter is not None and hasattr(parameter, "master") and prefix + name in state:
            parameter.master.copy_(state[prefix + name])


def weights_of(module: nn.Module) -> Weights:
    """Return the module's `Weights`, and make them in float32 if there are none yet."""
    return module.__dict__.get("weights") or Weights(module)


def clone(module: Module) -> Module:
    """Return a copy with its own full-precision parameters, whatever the original computes in."""
    own = module.__dict__.pop("weights", None)
    # Dropout's generators are shared: one that a captured graph uses must not be copied.
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
