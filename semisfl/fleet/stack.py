"""Several clients' copies of one module, their weights stacked so that whole-fleet operations are single ones."""

import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from semisfl.algorithm.teacher import as_view
from semisfl.fleet.base import State


class Stack:
    """``slots`` copies of ``template``; parameter ``name`` of slot i is ``tensors[name][i]``."""

    def __init__(self, template: nn.Module, slots: int, trainable: bool = True) -> None:
        self.modules = [copy.deepcopy(template).requires_grad_(trainable) for _ in range(slots)]
        self.tensors: State = {}
        for name, tensor in template.state_dict().items():
            flat = torch.empty(slots * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
            self.tensors[name] = as_view(flat, tensor.shape, slots)
            for slot, module in enumerate(self.modules):
                owner, _, leaf = name.rpartition(".")
                target = getattr(module.get_submodule(owner), leaf)
                target.data = self.tensors[name][slot]
        self.load(template.state_dict())

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for module in self.modules for parameter in module.parameters()]

    def load(self, state: State, slot: int | None = None) -> None:
        """Give every slot, or one, the same state."""
        for name, tensor in self.tensors.items():
            (tensor if slot is None else tensor[slot]).copy_(state[name])

    def state(self, slot: int) -> State:
        return {name: tensor[slot] for name, tensor in self.tensors.items()}

    def mean(self) -> State:
        """Plain mean over the slots; integer counters are averaged and truncated."""
        return {
            name: tensor.mean(0) if tensor.is_floating_point() else tensor.double().mean(0).to(tensor.dtype)
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

    def __call__(self, x: Tensor, parallel: Callable[[Sequence[Callable[[], None]]], None]) -> Tensor:
        """Each slot's module on its share of the rows; ``parallel`` runs independent calls."""
        outputs: list[Tensor] = [x] * len(self.modules)

        def run(slot: int, module: nn.Module, share: Tensor) -> None:
            outputs[slot] = module(share)

        shares = x.chunk(len(self.modules))
        parallel([partial(run, *item) for item in zip(range(len(shares)), self.modules, shares, strict=True)])
        return torch.cat(outputs)
