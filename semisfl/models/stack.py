"""Several clients' copies of one module, with stacked weights: one operation updates all of them."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from semisfl.engine.weights import State, Weights, clone, distinct_names
from semisfl.models.stacked import NotStacked, Pass, Rows, stacked

log = logging.getLogger(__name__)

Call = Callable[[], Any]
Parallel = Callable[[Sequence[Call]], list[Any]]


def in_turn(calls: Sequence[Call]) -> list[Any]:
    return [call() for call in calls]


class Stack:
    """``slots`` copies of ``template``; weight ``name`` of slot i is ``tensors[name][i]``.

    ``dtype`` is what their layers compute in (`Weights`). On a GPU, working copies of a template
    made of known layers are computed for all slots at once; ``parameters`` then are those of the
    template with one row per slot. ``together`` sets this for any device.
    """

    def __init__(
        self,
        template: nn.Module,
        slots: int,
        trainable: bool = True,
        dtype: torch.dtype = torch.float32,
        together: bool | None = None,
    ) -> None:
        self.modules = [clone(template).requires_grad_(trainable) for _ in range(slots)]
        self._weights = Weights(nn.ModuleList(self.modules), dtype)
        self.tensors: State = {}
        self._outputs: list[Tensor] = []
        states = [module.state_dict() for module in self.modules]
        for name, first in states[0].items():
            if first.is_floating_point():
                self.tensors[name] = _rows([state[name] for state in states])
            else:
                self.tensors[name] = torch.stack([state[name] for state in states])
                for slot, module in enumerate(self.modules):
                    module.get_buffer(name).data = self.tensors[name][slot]
        self._distinct = distinct_names(self.modules[0])
        stacked_parameters = [
            self.stacked(row).requires_grad_(trainable)
            for row in zip(*(module.parameters() for module in self.modules), strict=True)
        ]
        if together is None:
            together = self._weights.work is not None and self._weights.work.is_cuda
        self._pass = self._together(stacked_parameters, say=trainable) if together else None
        self.parameters: list[Tensor] = (
            stacked_parameters
            if self._pass is not None
            else [parameter for module in self.modules for parameter in module.parameters()]
        )

    def _together(self, parameters: Sequence[Tensor], say: bool) -> Pass | None:
        """Return the pass of all slots at once, or None if a layer does not support it."""
        first = self.modules[0]
        rows: Rows = {
            **{id(own): rows for own, rows in zip(first.parameters(), parameters, strict=True)},
            # A buffer that no state holds belongs to a layer that is not stacked.
            **{id(b): self.tensors[n] for n, b in first.named_buffers() if n in self.tensors},
        }
        try:
            return stacked(self.modules, rows)
        except NotStacked as layer:
            if say:
                log.warning("clients' models are computed one by one, slower, due to %s", layer)
            return None

    @staticmethod
    def stacked(slots: Sequence[nn.Parameter]) -> Tensor:
        """Return one parameter of every slot as one tensor, with its `Home` if it is a working copy."""
        rows = _rows([parameter.detach() for parameter in slots])
        home = getattr(slots[0], "home", None)
        if home is None:
            rows.slots = len(slots)  # type: ignore[attr-defined]
        else:
            rows.home = home._replace(rows=len(slots), stride=rows.stride(0))  # type: ignore[attr-defined]
        return rows

    def load(self, state: State, slot: int | None = None) -> None:
        """Give every slot, or one, the same state."""
        for name, tensor in self.tensors.items():
            (tensor if slot is None else tensor[slot]).copy_(state[name])
        self._weights.refresh()

    def state(self, slot: int) -> State:
        return {name: tensor[slot] for name, tensor in self.tensors.items()}

    def mean(self) -> State:
        """Return the plain mean over the slots; integer counters are averaged and truncated."""
        return {name: mean_of_rows(tensor) for name, tensor in self.tensors.items()}

    def follow(self, other: "Stack", decay: Tensor) -> None:
        """Follow ``other`` as a moving average, slot by slot, with one ``decay`` per slot."""
        for name, tensor in self.tensors.items():
            if not tensor.is_floating_point():
                tensor.copy_(other.tensors[name])
            elif name in self._distinct:
                weight = (1 - decay).view(-1, *[1] * (tensor.dim() - 1))
                tensor.lerp_(other.tensors[name], weight)
        self._weights.refresh()

    def __call__(self, x: Tensor, parallel: Parallel = in_turn) -> Tensor:
        """Return the outputs of each slot's module on its share of the rows; ``parallel`` runs the calls."""
        return self.joined(parallel(self.calls(x)) if self._pass is None else [self._pass(x)])

    def calls(self, x: Tensor) -> list[Callable[[], Tensor]]:
        """Return the passes: one per slot over its share of the rows, or one for all; `joined` joins the results."""
        if self._pass is not None:
            return [partial(self._pass, x)]
        shares = x.chunk(len(self.modules))
        return [partial(module, share) for module, share in zip(self.modules, shares, strict=True)]

    def joined(self, outputs: list[Tensor]) -> Tensor:
        # Kept for `gradients`, which a GPU does not use; there they would waste memory.
        self._outputs = [] if outputs[0].is_cuda else outputs
        return outputs[0] if self._pass is not None else torch.cat(outputs)

    def gradients(self, upstream: Tensor, parallel: Parallel = in_turn) -> list[Tensor | None]:
        """Return the gradients of `parameters`, from the gradient of the last call's result (on a CPU)."""
        outputs, self._outputs = self._outputs, []
        if self._pass is not None:
            return list(
                torch.autograd.grad(outputs[0], self.parameters, upstream, allow_unused=True)
            )
        rows = upstream.chunk(len(self.modules))
        calls = [
            partial(
                torch.autograd.grad, output, list(module.parameters()), share, allow_unused=True
            )
            for output, module, share in zip(outputs, self.modules, rows, strict=True)
        ]
        return [gradient for slot in parallel(calls) for gradient in slot]


def mean_of_rows(rows: Tensor) -> Tensor:
    """Return the mean over the first dimension; counters are averaged as doubles and truncated."""
    return rows.mean(0) if rows.is_floating_point() else rows.double().mean(0).to(rows.dtype)


def _rows(slots: Sequence[Tensor]) -> Tensor:
    """Return one weight of all slots as one view; the slots have a constant stride in memory."""
    first, following = slots[0], slots[1:2] or slots
    stride = following[0].storage_offset() - first.storage_offset()
    return first.as_strided((len(slots), *first.shape), (stride, *first.stride()))
