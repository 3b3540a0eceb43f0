"""Run full-model rounds in this process: each active client runs the client half in its own slot.

On a GPU one step of all slots is captured and replayed. On a CPU each slot runs all its steps in one
call, one core per slot, so that no core waits for another between steps.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import compress
from threading import Event
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from semisfl import seeds
from semisfl.data.batches import (
    DrawnView,
    Part,
    RoundBatches,
    ViewKind,
    draw_view,
    join_views,
    make_view,
)
from semisfl.data.positions import draw_batches, draw_passes
from semisfl.engine.hardware import Hardware
from semisfl.engine.host import HostShelf
from semisfl.engine.sgd import SGD
from semisfl.engine.sums import UNREGULARISED, Regularisers, add_up
from semisfl.engine.weights import clone, weights_of
from semisfl.fleet.base import ClientResult, ClientWork, FullRound, State
from semisfl.fleet.byte_counts import Direction, Traffic
from semisfl.fleet.codec import roundtrip_state, state_bytes
from semisfl.fleet.setup import FleetSetup
from semisfl.models.layers import use_generator
from semisfl.settings.config import Config
from semisfl.stopping import Stopped

PREDICT_BATCH = 512


@dataclass(frozen=True)
class SlotParts:
    """What all slots of a simulation share: a model to copy, true labels, batches and byte counts."""

    template: nn.Module
    labels: Tensor
    """True labels of all images, for statistics only."""
    classes: int
    batches: RoundBatches
    traffic: Traffic
    momenta: HostShelf
    """With `optimizer.keep_momentum`, each client's momentum after its latest round, by its index as text."""


class Slot:
    """One simulated client of a full-model round: `ClientRuntime` in this process.

    A slot is used for another client in another round. Its models, buffers and optimisers keep their
    memory between rounds, because a captured step reads and writes them in place.
    """

    def __init__(self, parts: SlotParts, config: Config, hardware: Hardware) -> None:
        self.device = hardware.device
        self.batch = config.clients.batch
        self.classes = parts.classes
        self._config = config
        self._hardware = hardware
        self._parts = parts
        self._models: dict[str, nn.Module] = {}
        self._sgd: dict[int, SGD] = {}
        self._buffers: dict[str, Tensor] = {}
        self._generator = hardware.generator(0)
        self.batches: RoundBatches | Part = parts.batches
        self.plans: dict[str, DrawnView] = {}
        self.views: dict[str, Tensor] = {}

    def begin(
        self, work: ClientWork, round_plan: FullRound, client: int, shard: np.ndarray
    ) -> None:
        """Begin a round for ``client``, which holds the images ``shard``: receive what is sent, as the codec leaves it."""
        self.client = client
        self._only_called: Sequence[str] = getattr(work, "only_called", ())
        self.round_index = round_plan.index
        self.steps = self.used_steps = round_plan.steps
        self.settings: Mapping[str, Any] = round_plan.settings
        self.count = len(shard)
        self._round = round_plan
        self._shard = shard
        self.plans = {}
        self._generator.manual_seed(
            seeds.derive(self._config.seed, "dropout", round_plan.index, client)
        )
        for sgd in self._sgd.values():
            self._restart(sgd)
        self._received: dict[str, State] = {}
        for name, state in round_plan.held.get(client, {}).items():
            self._received[name] = roundtrip_state(state, self._config.wire.models)
        for name, state in {**round_plan.send, **round_plan.send_to.get(client, {})}.items():
            self._receive(name, state)

    def _receive(self, name: str, state: State) -> None:
        self.count_bytes("down", name, state)
        self._received[name] = roundtrip_state(state, self._config.wire.models)

    def count_bytes(self, direction: Direction, name: str, state: State) -> None:
        """Count a state that is sent to or from this client."""
        kind = self._round.kinds.get(name, "model")
        count = state_bytes(state, self._config.wire.models)
        self._parts.traffic.add(kind, direction, self.client, count)

    def model(self, name: str) -> nn.Module:
        """Return this slot's model of this name; it is copied from the run's model when first asked for."""
        if name not in self._models:
            # Images are channels-last, and convolutions are fastest if the weights are too.
            model = clone(self._parts.template)
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            copied = any(fnmatchcase(name, pattern) for pattern in self._only_called)
            if copied and self._hardware.weights_dtype != torch.float32:
                self._hardware.working_copy(model)
            self._models[name] = model
            use_generator(model, self._generator)
        return self._models[name]

    def sum_model(self, name: str, fixed: str, learned: str, names: Sequence[str]) -> nn.Module:
        """Make model ``name`` the sum of two others in ``names``, once; later calls add up again."""
        if name in self._models:
            weights_of(self._models[name]).refresh()
        else:
            parts = self.model(fixed), self.model(learned)
            add_up(self.model(name), *parts, names, self._hardware.dtype)
        return self.model(name)

    def received(self, name: str) -> State | None:
        """Return a state sent at the round's start; None if this client was not sent it."""
        return self._received.get(name)

    def fetch(self, name: str) -> State:
        """Receive a state of `FullRound.on_request`, once per round."""
        if name not in self._received:
            self._receive(name, self._round.on_request[name])
        return self._received[name]

    def rng(self, purpose: str) -> np.random.Generator:
        """Return the host generator of this client, round and purpose."""
        return seeds.generator(self._config.seed, purpose, self.round_index, self.client)

    def _planned(self, purpose: str, view: ViewKind, positions: np.ndarray) -> DrawnView:
        images = self._parts.batches.images
        return draw_view(
            self._parts.batches.augmentation,
            view,
            self._shard[positions],
            (images.shape[2], images.shape[3]),
            self._config.seed,
            purpose,
            self.round_index,
            self.client,
        )

    def images(self, view: ViewKind, batch: int) -> Iterator[Tensor]:
        """Yield one view of every local image, normalised, at most ``batch`` at a time."""
        batches = self._parts.batches
        planned = self._planned(f"predict-{view}", view, np.arange(self.count)[:, None])
        for first in range(0, self.count, batch):
            yield batches.normalizer(
                make_view(batches.images, planned[first : first + batch]), batches.dtype
            )

    @torch.no_grad()
    def predict(self, model: nn.Module, view: ViewKind) -> Tensor:
        """Return softmax [images, classes] of ``model`` in eval mode on one view of every local image."""
        mode = model.training
        model.eval()
        with self._hardware.arithmetic():
            out = [model(images).float().softmax(1) for images in self.images(view, PREDICT_BATCH)]
        model.train(mode)
        return torch.cat(out)

    def draw_batches(self, rng: np.random.Generator, pool: np.ndarray) -> np.ndarray:
        """Return batches [steps, batch] of the images in ``pool``, and decide how many of them are used."""
        pool = pool if len(pool) else np.zeros(1, dtype=np.int64)
        epochs = self._config.clients.epochs
        if epochs is None:
            return pool[draw_batches(rng, len(pool), self.steps, self.batch)]
        self.used_steps = min(self.steps, epochs * -(-len(pool) // self.batch))
        return pool[draw_passes(rng, len(pool), self.steps, self.batch)]

    def draw_view(self, name: str, view: ViewKind, indices: np.ndarray) -> None:
        """Draw a view of the local images ``indices`` [steps, batch], to be made step by step."""
        self.plans[name] = self._planned(name, view, indices)

    def batch_of(self, name: str) -> Tensor:
        """Return this step's normalised images of a drawn view."""
        return self.views[name]

    def truth(self, indices: np.ndarray) -> Tensor:
        """Return the true labels of local images, in the shape of ``indices``."""
        labels = self._parts.labels
        return labels[torch.from_numpy(self._shard[indices]).to(labels.device)]

    def set_buffer(self, name: str, value: Tensor) -> Tensor:
        """Copy ``value`` to the buffer of this name, which keeps its memory if shape and dtype are the same."""
        kept = self._buffers.get(name)
        if kept is None or kept.shape != value.shape or kept.dtype != value.dtype:
            self._buffers[name] = kept = value.detach().to(self.device).clone()
        else:
            kept.copy_(value)
        return kept

    def buffer(self, name: str) -> Tensor:
        """Return the buffer of this name."""
        return self._buffers[name]

    def buffer_step(self, name: str) -> Tensor:
        """Return the current step's row of a buffer [steps, ...]."""
        return self.batches.row_of(self._buffers[name])

    def step(self, work: ClientWork, names: Sequence[str]) -> None:
        """Take one step of ``work`` on a part of the batches that only this slot reads."""
        for name in names:
            self.views[name] = self.batches.get(name)
        work.step(self)
        self.batches.advance()

    def descend(
        self,
        model: nn.Module,
        loss: Tensor,
        clip_norm: float | None = None,
        regularisers: Regularisers = UNREGULARISED,
    ) -> None:
        """Take one SGD step of ``model``; its optimiser is made at the first one and kept."""
        if id(model) not in self._sgd:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            self._sgd[id(model)] = SGD(trained, self._config.optimizer)
            self._restart(self._sgd[id(model)])
        self._sgd[id(model)].descend(loss, clip_norm=clip_norm, regularisers=regularisers)

    def _restart(self, sgd: SGD) -> None:
        """Begin this client's round with the learning rate, and with its momentum if that is kept."""
        sgd.restart(self._round.lr * self._config.optimizer.pretrained_share)
        if str(self.client) in self._parts.momenta:
            sgd.load_state_dict({"moments": self._parts.momenta.get(str(self.client)).values()})

    def keep_momentum(self) -> None:
        """Store this client's momentum for its next round, if the run keeps it."""
        if self._config.optimizer.keep_momentum and self.steps:
            (sgd,) = self._sgd.values()  # of the one model that a client trains
            moments = enumerate(sgd.state_dict()["moments"])
            self._parts.momenta.put(
                str(self.client), {str(place): moment for place, moment in moments}
            )


class FullModelClients:
    """Run a method's client half for a block of clients, each in a slot of its own.

    Slots are kept between rounds, as many as the largest round needed; captured steps are kept per work
    and number of slots.
    """

    def __init__(
        self,
        setup: FleetSetup,
        shards: Sequence[np.ndarray],
        batches: RoundBatches,
        traffic: Traffic,
    ) -> None:
        assert setup.labels is not None
        self.batches = batches
        self.momenta = HostShelf(setup.hardware.device)
        self._parts = SlotParts(
            *(setup.model.whole(), setup.labels, setup.classes, batches, traffic, self.momenta)
        )
        self._shards = shards
        self._config, self._hardware, self._stop = setup.config, setup.hardware, setup.stop
        self._slots: list[Slot] = []
        self._captured: dict[tuple[str, int], Callable[[], None]] = {}

    def train(
        self,
        work: ClientWork,
        round_plan: FullRound,
        between: Callable[[], None] = lambda: None,
    ) -> list[ClientResult]:
        """Run the round and return one result per active client, in their order.

        ``between`` is called on the host before every step, and may raise to end the round.
        """
        count = len(round_plan.active)
        while len(self._slots) < count:
            self._slots.append(Slot(self._parts, self._config, self._hardware))
        slots = self._slots[:count]
        contributes = []
        for slot, client in zip(slots, round_plan.active, strict=True):
            slot.begin(work, round_plan, client, self._shards[client])
            contributes.append(work.start(slot))
        if not any(contributes):
            return [ClientResult(client, {}, {}) for client in round_plan.active]
        if not round_plan.steps:
            every = zip(slots, contributes, strict=True)
            return [self._finish(work, slot, ok) for slot, ok in every]
        self._start_batches(slots)

        def before_step() -> None:  # on the host: a replayed step contains no Python
            self._stop.check()
            between()

        on_cpu = self._hardware.device.type == "cpu"
        run = self._at_their_own_pace if on_cpu else self._together
        return run(work, slots, contributes, before_step)

    def _at_their_own_pace(
        self,
        work: ClientWork,
        slots: list[Slot],
        contributes: list[bool],
        before_step: Callable[[], None],
    ) -> list[ClientResult]:
        """Run all steps of a slot in one call, so that no core waits for another between steps.

        If the caller is interrupted, all slots end after their current step; if a slot fails, those after it do.
        """
        given_up = Event()

        def all_steps(slot: Slot, part: Part) -> None:
            slot.batches = part
            for _ in part.steps[: max(0, slot.used_steps - part.steps.start)]:
                if given_up.is_set():
                    raise Stopped
                before_step()
                slot.step(work, self._names)

        for parts in self.batches.stretches(len(slots)):
            calls = [
                partial(all_steps, slot, part) for slot, part in zip(slots, parts, strict=True)
            ]
            with self._hardware.streams.a_core_each():
                try:
                    self._hardware.streams.side_by_side(list(compress(calls, contributes)))
                except BaseException:
                    given_up.set()
                    raise
        return [self._finish(work, slot, ok) for slot, ok in zip(slots, contributes, strict=True)]

    def _together(
        self,
        work: ClientWork,
        slots: list[Slot],
        contributes: list[bool],
        before_step: Callable[[], None],
    ) -> list[ClientResult]:
        """Run each step of all slots side by side; a GPU captures the step once and replays it.

        A slot's result is read after its last step. It steps on beside the others, to no effect.
        """
        key = (work.name, len(slots))
        if key not in self._captured:
            self._captured[key] = self._hardware.make_step(lambda: self._step(work, slots))
        results: dict[int, ClientResult] = {}
        for step in range(max(slot.used_steps for slot in slots)):
            before_step()
            self._captured[key]()
            for slot, ok in zip(slots, contributes, strict=True):
                if slot.used_steps == step + 1:
                    results[slot.client] = self._finish(work, slot, ok)
        return [results[slot.client] for slot in slots]

    def _start_batches(self, slots: list[Slot]) -> None:
        """Prepare one large batch per view; a slot that contributes nothing gets its first image."""
        names = {name: planned for slot in slots for name, planned in slot.plans.items()}
        for slot in slots:
            for name, planned in names.items():
                if name not in slot.plans:
                    slot.draw_view(name, planned.view, np.zeros_like(planned.indices))
        # A captured step reads its buffers by their address, so they have a fixed length there.
        most = None if self.batches.whole else max(slot.used_steps for slot in slots)
        self.batches.start(
            {name: join_views([slot.plans[name] for slot in slots])[:most] for name in names}
        )
        self._names = tuple(names)

    def _step(self, work: ClientWork, slots: list[Slot]) -> None:
        for name in self._names:
            for slot, share in zip(slots, self.batches.get(name).chunk(len(slots)), strict=True):
                slot.views[name] = share
        self._hardware.streams.side_by_side([lambda slot=slot: work.step(slot) for slot in slots])  # type: ignore[misc]
        self.batches.advance()

    def _finish(self, work: ClientWork, slot: Slot, contributes: bool) -> ClientResult:
        """Return a slot's result, its states as the codec leaves them and copied: the slot is used again."""
        if not contributes:
            return ClientResult(slot.client, {}, {})
        states, numbers = work.finish(slot)
        slot.keep_momentum()
        arrived = {}
        for name, state in states.items():
            received = roundtrip_state(state, self._config.wire.models)
            slot.count_bytes("up", name, received)
            arrived[name] = {key: tensor.clone() for key, tensor in received.items()}
        return ClientResult(slot.client, arrived, numbers)
