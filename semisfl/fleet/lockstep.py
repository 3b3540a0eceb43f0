"""Clients' full models as stacks: their steps run side by side and meet wherever a model is called or stepped.

A method's client half is written for one client. Here every client's step has a thread of its own, of
which one runs at a time; whoever calls a model, or descends, waits until all others do, and that one
call is then made for all of them at once. On a GPU this happens only until the step is captured.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Semaphore, Thread
from typing import Any

import torch
from torch import Tensor, nn

from semisfl.engine.hardware import Hardware
from semisfl.engine.sgd import SGD
from semisfl.engine.stack import Stack
from semisfl.engine.stacked_layers import stacked
from semisfl.run_settings import OptimizerConfig

Step = Callable[[], None]


class _GivenUp(BaseException):
    """Ends a client's thread after another's has failed."""


@dataclass
class _Client:
    """A client's thread: what it asks all others to join in, and what it is answered."""

    go: Semaphore = field(default_factory=lambda: Semaphore(0))
    asked: tuple[str, str] | None = None
    given: Any = None
    answer: Any = None
    error: BaseException | None = None


class Lockstep:
    def __init__(
        self, template: nn.Module, slots: int, config: OptimizerConfig, hardware: Hardware
    ) -> None:
        self.slots = slots
        self._template, self._config, self._hardware = template, config, hardware
        self._stacks: dict[str, Stack] = {}
        self._sgd: dict[str, SGD] = {}
        self._versions: dict[str, list[int]] = {}
        self._clients: list[_Client] = []
        self._back = Semaphore(0)
        self.running = self._over = False

    def model(self, name: str, slot: int) -> nn.Module:
        if name not in self._stacks:
            dtype = self._hardware.weights_dtype
            stack = Stack(self._template, self.slots, dtype=dtype, together=True)
            stack.show_masters()
            for place, module in enumerate(stack.modules):
                module.forward = partial(self._forward, name, place, module.forward)
            self._stacks[name] = stack
        return self._stacks[name].modules[slot]

    def start_round(self, lr: float) -> None:
        """Models have been loaded; every optimiser begins anew."""
        for name, stack in self._stacks.items():
            stack.refresh()
            self._versions[name] = _versions(stack)
        for sgd in self._sgd.values():
            sgd.restart(lr)

    @torch.no_grad()
    def saved(self) -> Callable[[], None]:
        """What brings all models back to what they are now."""
        tensors = [t for stack in self._stacks.values() for t in stack.tensors.values()]
        copies = [tensor.clone() for tensor in tensors]

        @torch.no_grad()
        def restore() -> None:
            for tensor, copied in zip(tensors, copies, strict=True):
                tensor.copy_(copied)

        return restore

    # --- what a client's thread calls -------------------------------------------------------------

    def _forward(
        self, name: str, slot: int, alone: Callable[[Tensor], Tensor], x: Tensor
    ) -> Tensor:
        if not self.running:
            return alone(x)
        answer: Tensor = self._meet(slot, ("forward", name), (x, torch.is_grad_enabled()))
        return answer

    def descend(
        self, slot: int, model: nn.Module, loss: Tensor, clip_norm: float | None, lr: Tensor
    ) -> None:
        names = (name for name, stack in self._stacks.items() if stack.modules[slot] is model)
        self._meet(slot, ("descend", next(names)), (loss, clip_norm, lr))

    def _meet(self, slot: int, what: tuple[str, str], given: Any) -> Any:
        client = self._clients[slot]
        client.asked, client.given = what, given
        self._back.release()
        client.go.acquire()
        if self._over:
            raise _GivenUp
        return client.answer

    # --- what is done for all of them ------------------------------------------------------------

    def run(self, steps: Sequence[Step]) -> None:
        """One step of every slot, from its first meeting to its last."""
        self._clients = [_Client() for _ in steps]
        self.running, self._over = True, False
        threads = [
            Thread(target=self._alone, args=(slot, step), daemon=True)
            for slot, step in enumerate(steps)
        ]
        for thread in threads:
            thread.start()
        try:
            while self._all_asked():
                self._answer()
        finally:
            self._over = True
            for client in self._clients:
                client.go.release()
            for thread in threads:
                thread.join()
            self.running, self._clients = False, []

    def _alone(self, slot: int, step: Step) -> None:
        client = self._clients[slot]
        client.go.acquire()
        try:
            if self._over:
                return
            # The stream, like autocast, is a matter of each thread.
            with self._hardware.streams.one_of_several(slot), self._hardware.arithmetic():
                step()
        except _GivenUp:
            return
        except BaseException as error:
            client.error = error
        client.asked = None
        self._back.release()

    def _all_asked(self) -> bool:
        """Let everybody go on to the next meeting; False: all steps are at their end."""
        self._hardware.streams.fork()
        for client in self._clients:
            client.asked = None
            client.go.release()
            self._back.acquire()
            if client.error is not None:
                raise client.error
        self._hardware.streams.join_several()
        asked = {client.asked for client in self._clients}
        if len(asked) > 1:
            raise RuntimeError(
                f"clients' steps differ: {asked}; a step must call the same models in the same order"
            )
        return asked != {None}

    def _answer(self) -> None:
        clients = self._clients
        assert clients[0].asked is not None
        kind, name = clients[0].asked
        firsts = [client.given[0] for client in clients]
        how = clients[0].given[1:]
        answers: Sequence[Tensor | None]
        if kind == "forward":
            with torch.set_grad_enabled(*how):
                answers = self._pass(name, firsts)
        else:
            self._descend(name, firsts, *how)
            answers = (None,) * len(clients)
        for client, answer in zip(clients, answers, strict=True):
            client.answer, client.given = answer, None

    def _pass(self, name: str, images: list[Tensor]) -> Sequence[Tensor]:
        """Of all slots; weights that somebody put in the place of a model's own are stacked here."""
        stack = self._stacks[name]
        if (versions := _versions(stack)) != self._versions.get(name):
            # Weights were changed by others than `_descend`, which keeps working copies up to date.
            stack.refresh()
            self._versions[name] = versions
        rows = {}
        for own, row, *there in zip(
            stack.first_parameters,
            stack.parameters,
            *(module.parameters() for module in stack.modules),
            strict=True,
        ):
            if there[0] is own:
                rows[id(own)] = row if own.requires_grad else row.detach()
            else:
                rows[id(there[0])] = torch.stack(there)
        out = stacked(stack.modules, {**rows, **stack.buffers})(torch.cat(images))
        return out.chunk(len(images))

    def _descend(
        self, name: str, losses: list[Tensor], clip_norm: float | None, lr: Tensor
    ) -> None:
        """Clients' losses have nothing in common, so the gradient of their sum is that of each."""
        stack = self._stacks[name]
        if name not in self._sgd:
            self._sgd[name] = SGD(stack.parameters, self._config)
            self._sgd[name].lr.copy_(lr)
        own = [list(module.parameters()) for module in stack.modules]
        leaves = [*stack.parameters, *(parameter for module in own for parameter in module)]
        found = torch.autograd.grad(torch.stack(losses).sum(), leaves, allow_unused=True)
        count = len(stack.parameters)
        gradients = [
            _added(row, [found[count * (1 + slot) + place] for slot in range(self.slots)])
            for place, row in enumerate(found[:count])
        ]
        with torch.no_grad():
            if clip_norm is not None:
                gradients = _clipped(gradients, clip_norm)
            self._sgd[name].apply(gradients)


def _versions(stack: Stack) -> list[int]:
    """Of the first slot's weights: they grow whenever somebody changes them in place."""
    return [parameter._version for parameter in stack.first_parameters]


def _added(row: Tensor | None, slots: list[Tensor | None]) -> Tensor | None:
    """The gradient that came by the stacked weights, and that which came by each slot's own."""
    present = [gradient for gradient in slots if gradient is not None]
    if not present:
        return row
    assert len(present) == len(slots), "clients' steps use different weights"
    alone = torch.stack(present)
    return alone if row is None else row + alone


def _clipped(gradients: list[Tensor | None], clip_norm: float) -> list[Tensor | None]:
    """Every slot's gradients, their joint norm limited."""
    squares = [g.float().flatten(1).square().sum(1) for g in gradients if g is not None]
    norms = torch.stack(squares).sum(0).sqrt()
    share = (clip_norm / (norms + 1e-6)).clamp(max=1.0)
    return [
        None if g is None else g * share.to(g.dtype).view(-1, *[1] * (g.dim() - 1))
        for g in gradients
    ]
