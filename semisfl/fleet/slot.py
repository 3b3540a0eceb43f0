"""Run one simulated client of a full-model round."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from semisfl import seeds
from semisfl.data.batches import DrawnView, Part, RoundBatches, ViewKind, draw_view, make_view
from semisfl.engine.hardware import Hardware
from semisfl.engine.sgd import SGD
from semisfl.engine.sums import UNREGULARISED, Regularisers, add_up
from semisfl.engine.weights import clone, weights_of
from semisfl.fleet.base import ClientWork, FullRound, State
from semisfl.fleet.byte_counts import Direction, Traffic
from semisfl.fleet.codec import roundtrip_state, state_bytes
from semisfl.models.layers import use_generator
from semisfl.settings.config import Config

PREDICT_BATCH = 512


@dataclass(frozen=True)
class SlotParts:
    """Hold what all slots of a simulation share."""

    template: nn.Module
    labels: Tensor
    """True labels of all images, for statistics only."""
    classes: int
    batches: RoundBatches
    traffic: Traffic


class Slot:
    """Implement `ClientRuntime` in a simulation. Models and buffers keep their memory between rounds."""

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
        self.client = client
        self._only_called: Sequence[str] = getattr(work, "only_called", ())
        self.round_index = round_plan.index
        self.steps = round_plan.steps
        self.settings: Mapping[str, Any] = round_plan.settings
        self.count = len(shard)
        self._round = round_plan
        self._shard = shard
        self.plans = {}
        self._generator.manual_seed(
            seeds.derive(self._config.seed, "dropout", round_plan.index, client)
        )
        for sgd in self._sgd.values():
            sgd.restart(round_plan.lr)
        self._received: dict[str, State] = {}
        for name, state in round_plan.held.get(client, {}).items():
            self._received[name] = roundtrip_state(state, self._config.wire.models)
        for name, state in {**round_plan.send, **round_plan.send_to.get(client, {})}.items():
            self._receive(name, state)

    def _receive(self, name: str, state: State) -> None:
        self.count_bytes("down", name, state)
        self._received[name] = roundtrip_state(state, self._config.wire.models)

    def count_bytes(self, direction: Direction, name: str, state: State) -> None:
        kind = self._round.kinds.get(name, "model")
        count = state_bytes(state, self._config.wire.models)
        self._parts.traffic.add(kind, direction, self.client, count)

    def model(self, name: str) -> nn.Module:
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
        if name in self._models:
            weights_of(self._models[name]).refresh()
        else:
            parts = self.model(fixed), self.model(learned)
            add_up(self.model(name), *parts, names, self._hardware.dtype)
        return self.model(name)

    def received(self, name: str) -> State | None:
        return self._received.get(name)

    def fetch(self, name: str) -> State:
        if name not in self._received:
            self._receive(name, self._round.on_request[name])
        return self._received[name]

    def rng(self, purpose: str) -> np.random.Generator:
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
        batches = self._parts.batches
        planned = self._planned(f"predict-{view}", view, np.arange(self.count)[:, None])
        for first in range(0, self.count, batch):
            yield batches.normalizer(
                make_view(batches.images, planned[first : first + batch]), batches.dtype
            )

    @torch.no_grad()
    def predict(self, model: nn.Module, view: ViewKind) -> Tensor:
        mode = model.training
        model.eval()
        with self._hardware.arithmetic():
            out = [model(images).float().softmax(1) for images in self.images(view, PREDICT_BATCH)]
        model.train(mode)
        return torch.cat(out)

    def draw_view(self, name: str, view: ViewKind, indices: np.ndarray) -> None:
        self.plans[name] = self._planned(name, view, indices)

    def batch_of(self, name: str) -> Tensor:
        return self.views[name]

    def truth(self, indices: np.ndarray) -> Tensor:
        labels = self._parts.labels
        return labels[torch.from_numpy(self._shard[indices]).to(labels.device)]

    def set_buffer(self, name: str, value: Tensor) -> Tensor:
        kept = self._buffers.get(name)
        if kept is None or kept.shape != value.shape or kept.dtype != value.dtype:
            self._buffers[name] = kept = value.detach().to(self.device).clone()
        else:
            kept.copy_(value)
        return kept

    def buffer(self, name: str) -> Tensor:
        return self._buffers[name]

    def buffer_step(self, name: str) -> Tensor:
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
        if id(model) not in self._sgd:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            self._sgd[id(model)] = SGD(trained, self._config.optimizer)
            self._sgd[id(model)].restart(float(self._round.lr))
        self._sgd[id(model)].descend(loss, clip_norm=clip_norm, regularisers=regularisers)
