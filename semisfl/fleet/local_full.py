"""Run full-model rounds in this process: each active client runs the client half in its own slot."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from threading import Event

import numpy as np

from semisfl.data.batches import Part, RoundBatches, side_by_side
from semisfl.fleet.base import ClientResult, ClientWork, FullRound
from semisfl.fleet.byte_counts import Traffic
from semisfl.fleet.codec import roundtrip_state
from semisfl.fleet.setup import FleetSetup
from semisfl.fleet.slot import Slot, SlotParts
from semisfl.stopping import Stopped


class FullModelClients:
    """Run a method's client half for a block of clients, each in a slot of its own."""

    def __init__(
        self,
        setup: FleetSetup,
        shards: Sequence[np.ndarray],
        batches: RoundBatches,
        traffic: Traffic,
    ) -> None:
        assert setup.labels is not None
        self.batches = batches
        self._parts = SlotParts(setup.model.whole(), setup.labels, setup.classes, batches, traffic)
        self._shards = shards
        self._config, self._hardware, self._stop = setup.config, setup.hardware, setup.stop
        self._slots: list[Slot] = []
        self._captured: dict[tuple[str, int], Callable[[], None]] = {}

    def train(
        self,
        work: ClientWork,
        round_plan: FullRound,
        between: Callable[[], None] | None = None,
    ) -> list[ClientResult]:
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
        if round_plan.steps:
            self._start_batches(slots)
            if self._hardware.device.type == "cpu":
                self._at_their_own_pace(work, slots, contributes, between)
            else:
                self._together(work, slots, round_plan.steps, between)
        return [self._finish(work, slot, ok) for slot, ok in zip(slots, contributes, strict=True)]

    def _at_their_own_pace(
        self,
        work: ClientWork,
        slots: list[Slot],
        contributes: list[bool],
        between: Callable[[], None] | None,
    ) -> None:
        """Run all steps of a slot in one call, so that no core waits for another between steps.

        If the caller is interrupted, all slots end after their current step; if a slot fails, those after it do.
        """
        given_up = Event()

        def all_steps(slot: Slot, part: Part) -> None:
            slot.batches = part
            for _ in part.steps:
                if given_up.is_set():
                    raise Stopped
                self._between_steps(between)
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

    def _together(
        self,
        work: ClientWork,
        slots: list[Slot],
        steps: int,
        between: Callable[[], None] | None,
    ) -> None:
        """Run each step of all slots side by side; a GPU captures the step once and replays it."""
        key = (work.name, len(slots))
        if key not in self._captured:
            self._captured[key] = self._hardware.make_step(lambda: self._step(work, slots))
        for _ in range(steps):
            self._between_steps(between)
            self._captured[key]()

    def _between_steps(self, between: Callable[[], None] | None) -> None:
        """Run the host's checks between two steps; a replayed step contains no Python."""
        self._stop.check()
        if between is not None:
            between()

    def _start_batches(self, slots: list[Slot]) -> None:
        """Prepare one large batch per view; a slot that contributes nothing gets its first image."""
        names = {name: planned for slot in slots for name, planned in slot.plans.items()}
        for slot in slots:
            for name, planned in names.items():
                if name not in slot.plans:
                    slot.draw_view(name, planned.view, np.zeros_like(planned.indices))
        self.batches.start(
            {name: side_by_side([slot.plans[name] for slot in slots]) for name in names}
        )
        self._names = tuple(names)

    def _step(self, work: ClientWork, slots: list[Slot]) -> None:
        for name in self._names:
            for slot, share in zip(slots, self.batches.get(name).chunk(len(slots)), strict=True):
                slot.views[name] = share
        self._hardware.streams.side_by_side([lambda slot=slot: work.step(slot) for slot in slots])  # type: ignore[misc]
        self.batches.advance()

    def _finish(self, work: ClientWork, slot: Slot, contributes: bool) -> ClientResult:
        if not contributes:
            return ClientResult(slot.client, {}, {})
        states, numbers = work.finish(slot)
        arrived = {}
        for name, state in states.items():
            received = roundtrip_state(state, self._config.wire.models)
            slot.count_bytes("up", name, received)
            arrived[name] = {key: tensor.clone() for key, tensor in received.items()}
        return ClientResult(slot.client, arrived, numbers)
