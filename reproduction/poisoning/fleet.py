"""Clients of one process, some of which attack. A simulation has many; a device is a block of one."""

from collections.abc import Callable, Container, Sequence
from dataclasses import replace

import torch

from reproduction.poisoning.attacks import (
    LATE_ROUNDS,
    Attack,
    Known,
    Sight,
    poisoned_state,
    stamped,
)
from semisfl import seeds
from semisfl.fleet.aggregate import combine
from semisfl.fleet.base import ClientResult, ClientWork, Features, FullRound, SplitRound, State
from semisfl.fleet.block import ClientBlock, StepFeatures
from semisfl.fleet.local import LocalFleet, as_states
from semisfl.fleet.outgoing import Cleared, Outgoing
from semisfl.fleet.setup import FleetSetup
from semisfl.runs.checkpoint import snapshot
from semisfl.settings.policy import DevicePolicy, Policy


def attackers_of(seed: int, total: int, share: float) -> frozenset[int]:
    """Return the attackers' numbers; a larger share contains the attackers of a smaller one."""
    order = seeds.generator(seed, "attackers").permutation(total)
    return frozenset(int(client) for client in order[: round(share * total)])


def poisoned_fleet(attack: Attack, share: float) -> Callable[[FleetSetup], "PoisonedFleet"]:
    """Return a maker of fleets, for `semisfl.runs.experiment.assemble`, with ``share`` of the clients attacking."""
    return lambda setup: PoisonedFleet(setup, attack, share)


class PoisonedFleet(LocalFleet):
    """A simulation in which some clients attack."""

    def __init__(self, setup: FleetSetup, attack: Attack, share: float) -> None:
        self.attackers = attackers_of(setup.config.seed, setup.config.clients.total, share)
        super().__init__(setup, lambda setup: PoisonedBlock(setup, attack, self.attackers))
        self.capturable = False  # the attackers change from round to round
        self._attack = attack

    def present(self) -> Sequence[int]:
        everybody = super().present()
        if self._attack.name == "absent":
            return [client for client in everybody if client not in self.attackers]
        return everybody

    def finish_round(self) -> State:
        bottoms = as_states(self.block.bottoms())
        return combine(self.config.robust, bottoms, self._plan.bottom, self.held_back)


class PoisonedBlock(ClientBlock):
    """The clients of one process; the attackers among them send poisoned values."""

    def __init__(
        self, setup: FleetSetup, attack: Attack, attackers: Container[int] | None = None
    ) -> None:
        """Take the numbers of the clients that attack; None: all. A device does not know how many there are."""
        super().__init__(setup)
        self.attack = attack
        self.attackers = range(len(self.shards)) if attackers is None else attackers
        # Attackers follow no policy.
        self._unguarded = Outgoing()
        self._unguarded.agree(setup.config.model_copy(update={"policy": Policy()}))
        self._unguarded.policy = DevicePolicy(full_models=self.outgoing.policy.full_models)
        self._generator = torch.Generator(setup.hardware.device)
        white = torch.full((1, *setup.shape), 255, dtype=torch.uint8, device=setup.hardware.device)
        self._white = float(setup.normalizer(white, torch.float32).max())
        self._first_states: dict[str, State] = {}
        """The states that the server sent in the first round, by name."""
        self._learnt: dict[tuple[str, int], State] = {}
        """The first update of each attacker, by the state's name and the client."""

    def _attackers_in(self, clients: Sequence[int], index: int) -> list[tuple[int, int]]:
        """Return places and numbers of those among ``clients`` that attack in round ``index``."""
        if self.attack.late and index < self.config.rounds - LATE_ROUNDS:
            return []
        return [(place, c) for place, c in enumerate(clients) if c in self.attackers]

    def _poisoned(self, name: str, client: int, index: int, state: State, received: State) -> State:
        """Return what ``client`` sends in round ``index`` in place of state ``name``."""
        first = self._first_states.setdefault(name, snapshot(received))
        learnt = self._learnt.setdefault(
            (name, client), {key: value - received[key].to(value) for key, value in state.items()}
        )
        known = Known(received, first, learnt, index, client)
        return poisoned_state(self.attack, state, known)

    def start_round(self, plan: SplitRound) -> None:
        super().start_round(plan)
        self._first_states.setdefault("bottom", snapshot(plan.bottom))
        self._first: Features | None = None
        self._generator.manual_seed(seeds.derive(self.config.seed, "attack", plan.index))

    def forward(self) -> StepFeatures:
        own = super().forward()
        if self.attack.features is None:
            return own
        tensors = own.cleared.tensors
        honest = Features(tensors["student"], tensors["teacher"], self._plan.active, own.truth)
        if self.attack.stamps:
            honest = self._with_pattern(honest)
        self._first = self._first or honest
        student, teacher = honest.student.clone(), honest.teacher.clone()
        for place, _ in self._attackers_in(honest.clients, self._plan.index):
            rows = slice(place * honest.batch, (place + 1) * honest.batch)
            sight = Sight(honest, self._first, rows, self._generator)
            student[rows], teacher[rows] = self.attack.features(sight)
        cleared, _ = self._unguarded.features(student, teacher, len(honest.clients))
        return replace(own, cleared=cleared)

    @torch.no_grad()
    def _with_pattern(self, honest: Features) -> Features:
        """Show every other image with the pattern to attackers' students."""
        assert self._students is not None
        student = honest.student.clone()
        shares = self.batches.get("strong").chunk(len(honest.clients))
        for place, _ in self._attackers_in(honest.clients, self._plan.index):
            seen = self._students.modules[place](stamped(shares[place], self._white))
            rows = slice(place * honest.batch, (place + 1) * honest.batch, 2)
            student[rows] = seen[::2].float()
        return replace(honest, student=student)

    def bottoms(self) -> dict[int, Cleared]:
        assert self._students is not None
        bottoms = super().bottoms()
        for place, client in self._attackers_in(self._plan.active, self._plan.index):
            plan, trained = self._plan, self._students.state(place)
            poisoned = self._poisoned("bottom", client, plan.index, trained, plan.bottom)
            bottoms[client] = self._unguarded.bottom(self._sent, poisoned, place)
        return bottoms

    def train(
        self,
        work: ClientWork,
        plan: FullRound,
        between: Callable[[], None] | None = None,
    ) -> list[ClientResult]:
        results = super().train(work, plan, between)
        attackers = {client for _, client in self._attackers_in(plan.active, plan.index)}
        return [
            replace(result, states=self._poisoned_states(result, plan))
            if result.client in attackers
            else result
            for result in results
        ]

    def _poisoned_states(self, result: ClientResult, plan: FullRound) -> dict[str, State]:
        sent = plan.known_to(result.client)
        if "model" in sent:
            sent = {"statistics": sent["model"], **sent}  # SemiFL's are part of its model
        return {
            name: self._poisoned(name, result.client, plan.index, state, sent[name])
            if name in sent
            else state
            for name, state in result.states.items()
        }
