"""Several clients' copies of one module, their weights stacked so that whole-fleet operations are single ones."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from semisfl.algorithm.weights import Weights, clone
from semisfl.fleet.base import State

Call = Callable[[], None]


def in_turn(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


class Stack:
    """``slots`` copies of ``template``; weight ``name`` of slot i is ``tensors[name][i]``.

    ``dtype`` is what their layers compute in (`Weights`).
    """

    def __init__(
        self,
        template: nn.Module,
        slots: int,
        trainable: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.modules = [clone(template).requires_grad_(trainable) for _ in range(slots)]
        self._weights = Weights(nn.ModuleList(self.modules), dtype)
        self.tensors: State = {}
        states = [module.state_dict() for module in self.modules]
        for name, first in states[0].items():
            if first.is_floating_point():
                # Slot after slot lies at a constant distance in the weights' one tensor.
                apart = states[-1][name].storage_offset() - first.storage_offset()
                stride = apart // (slots - 1) if slots > 1 else first.numel()
                self.tensors[name] = first.as_strided(
                    (slots, *first.shape), (stride, *first.stride())
                )
            else:
                self.tensors[name] = torch.stack([state[name] for state in states])
                for slot, module in enumerate(self.modules):
                    module.get_buffer(name).data = self.tensors[name][slot]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for module in self.modules for parameter in module.parameters()]

    def load(self, state: State, slot: int | None = None) -> None:
        """Give every slot, or one, the same state."""
        for name, tensor in self.tensors.items():
            (tensor if slot is None else tensor[slot]).copy_(state[name])
        self._weights.refresh()

    def state(self, slot: int) -> State:
        return {name: tensor[slot] for name, tensor in self.tensors.items()}

    def mean(self) -> State:
        """Plain mean over the slots; integer counters are averaged and truncated."""
        return {
            name: tensor.mean(0)
            if tensor.is_floating_point()
            else tensor.double().mean(0).to(tensor.dtype)
            for name, tensor in self.tensors.items()
        }

    def follow(self, other: "Stack", decay: Tensor) -> None:
        """Moving average of ``other``, slot by slot, with one ``decay`` a slot."""
        for name, tensor in self.tensors.items():
            if tensor.is_floating_point():
                weight = (1 - decay).view(-1, *[1] * (tensor.dim() - 1))
                tensor.lerp_(other.tensors[name], weight)
            else:
                tensor.copy_(other.tensors[name])
        self._weights.refresh()

    def __call__(self, x: Tensor, parallel: Callable[[Sequence[Call]], None] = in_turn) -> Tensor:
        """Each slot's module on its share of the rows; ``parallel`` runs independent calls."""
        outputs: list[Tensor] = [x] * len(self.modules)

        def run(slot: int, module: nn.Module, share: Tensor) -> None:
            outputs[slot] = module(share)

        shares = x.chunk(len(self.modules))
        parallel(
            [
                partial(run, *item)
                for item in zip(range(len(shares)), self.modules, shares, strict=True)
            ]
        )
        return torch.cat(outputs)
