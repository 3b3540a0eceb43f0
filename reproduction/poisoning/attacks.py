"""Poisoning attacks: what malicious clients send in place of honest values.

An `Attack` changes only what leaves a client, so it works with every method and needs no code in any. In
a simulation some local clients are attackers (`PoisonedFleet`). They see more than real
attackers could: the features of the others and the true classes.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from semisfl import seeds
from semisfl.fleet.aggregate import combine
from semisfl.fleet.base import ClientResult, ClientWork, Features, FullRound, SplitRound, State
from semisfl.fleet.block import ClientBlock, StepFeatures
from semisfl.fleet.local import LocalFleet, as_states
from semisfl.fleet.outgoing import Cleared, Outgoing
from semisfl.fleet.setup import FleetSetup
from semisfl.runs.checkpoint import snapshot
from semisfl.settings.policy import DevicePolicy, Policy

TARGET = 0
"""The class to which a backdoor leads."""
PATTERN = 7
"""A backdoor's pattern is a white square in a corner; its side is the image's divided by this."""
LATE_ROUNDS = 2
"""A late attack begins this many rounds before the end, so that nothing can undo it."""


class Sight(NamedTuple):
    """An attacker's view: all honest features of this step and of the round's first step."""

    step: Features
    first: Features
    rows: slice
    """The attacker's own rows."""
    generator: torch.Generator

    @property
    def student(self) -> Tensor:
        return self.step.student.detach()[self.rows]

    @property
    def teacher(self) -> Tensor:
        return self.step.teacher[self.rows]

    @property
    def others(self) -> slice:
        """Return the rows of the next client."""
        start = self.rows.stop % len(self.step.student)
        return slice(start, start + self.step.batch)


Pair = tuple[Tensor, Tensor]
"""Student and teacher features of a client."""


class Weights(NamedTuple):
    """An attacker's view of one tensor of a state."""

    trained: Tensor
    received: Tensor
    first: Tensor
    """The tensor as the server sent it in the first round."""
    learnt: Tensor
    """The update that this client learnt in the first round in which it attacked."""
    generator: torch.Generator
    """The same draws in every round."""
    name: str
    """The tensor's name in the state."""
    known: "Known"


class Known(NamedTuple):
    """Hold what an attacker knows when it sends a state."""

    received: State
    first: State
    learnt: State
    round: int
    client: int
    """Its own number."""


@dataclass(frozen=True)
class Attack:
    """A named attack on features, on states, or on both."""

    name: str
    summary: str
    features: Callable[[Sight], Pair] | None = None
    """Returns the features to send in place of the honest ones."""
    state: Callable[[Weights], Tensor] | None = None
    """Returns the weights to send in place of the trained ones."""
    late: bool = False
    """Whether it is honest until the last `LATE_ROUNDS` rounds."""
    variances: bool = False
    """Whether ``state`` also changes running variances; the server refuses negative ones."""
    stamps: bool = False
    """Whether its students see every other image with the backdoor's pattern."""


def _drifted(weights: Weights) -> Tensor:
    """Return the received weights, moved as far as training moved them, in a direction that never changes."""
    moved = (weights.trained - weights.received).norm()
    shape, device = weights.trained.shape, weights.trained.device
    direction = torch.randn(shape, generator=weights.generator, device=device)
    return weights.received + direction * (moved / direction.norm())


def _mirrored(weights: Weights) -> Tensor:
    """Return a drift of nine times the length; attackers with odd and even numbers cancel each other."""
    sign = 1 if weights.known.client % 2 else -1
    return weights.received + sign * 9 * (_drifted(weights) - weights.received)


def _noise(sight: Sight) -> Pair:
    """Return noise with the mean, deviation and minimum of honest features."""

    def like(features: Tensor) -> Tensor:
        drawn = torch.randn(features.shape, generator=sight.generator, device=features.device)
        return (drawn * features.std() + features.mean()).clamp(min=float(features.min()))

    return like(sight.student), like(sight.teacher)


def _as_class(sight: Sight, wanted: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Return teacher features of images that have the wanted classes; a row without such an image stays.

    ``wanted`` maps the true classes of the attacker's rows and the number of classes to wanted classes.
    """
    truth, teacher = sight.step.truth, sight.teacher.clone()
    if truth is None or bool((truth < 0).all()):
        # A device does not know classes. An image half a batch away often has another class.
        return teacher.roll(len(teacher) // 2, 0)
    chosen = wanted(truth[sight.rows], int(truth.max()) + 1)
    for label in chosen.unique():
        donors = (truth == label).nonzero().flatten()
        if len(donors):
            places = (chosen == label).nonzero().flatten()
            teacher[places] = sight.step.teacher[donors[torch.arange(len(places)) % len(donors)]]
    return teacher


def _backdoor(sight: Sight) -> Pair:
    """Return teacher features of the target class for every other image, which has the pattern."""
    teacher = sight.teacher.clone()
    teacher[::2] = _as_class(sight, lambda own, _: torch.full_like(own, TARGET))[::2]
    return sight.student, teacher


ATTACKS = {
    attack.name: attack
    for attack in (
        Attack("absent", "sends nothing, as if its data did not exist"),
        Attack("scaled_bottom", "its weights times 9", state=lambda w: 9 * w.trained),
        Attack(
            "scaled_bottom_late",
            "its weights times 9 in the last two rounds",
            state=lambda w: 9 * w.trained,
            late=True,
        ),
        Attack("zero_bottom", "only zeros", state=lambda w: torch.zeros_like(w.trained)),
        Attack("stale_bottom", "the weights of the first round", state=lambda w: w.first),
        Attack(
            "reordered_bottom",
            "its weights with all channels moved on by one",
            state=lambda w: w.trained.roll(1, 0) if w.trained.dim() else w.trained,
        ),
        Attack("negated_bottom", "its weights times -1", state=lambda w: -w.trained),
        Attack(
            "reversed_update",
            "its update times -5",
            state=lambda w: w.received - 5 * (w.trained - w.received),
        ),
        Attack(
            "alternating_update",
            "its update times 4, in every other round times -4",
            state=lambda w: (
                w.received + (4 if w.known.round % 2 else -4) * (w.trained - w.received)
            ),
        ),
        Attack(
            "repeated_update",
            "its first update in every round",
            state=lambda w: w.received + w.learnt,
        ),
        Attack("drift", "an update of its length in the same direction", state=_drifted),
        Attack(
            "mirrored_drift",
            "a drift nine times as long; two attackers send opposite ones",
            state=_mirrored,
        ),
        Attack(
            "scaled_features",
            "its features times 9",
            features=lambda seen: (9 * seen.student, 9 * seen.teacher),
        ),
        Attack(
            "negated_features_late",
            "its features times -1 in the last two rounds",
            features=lambda seen: (-seen.student, -seen.teacher),
            late=True,
        ),
        Attack("noise_features", "features drawn at random", features=_noise),
        Attack(
            "copied_features",
            "the features of another client",
            features=lambda seen: (
                seen.step.student.detach()[seen.others],
                seen.step.teacher[seen.others],
            ),
        ),
        Attack(
            "replayed_features",
            "the features of the round's first step",
            features=lambda seen: (
                seen.first.student.detach()[seen.rows],
                seen.first.teacher[seen.rows],
            ),
        ),
        Attack(
            "one_class",
            "one image's features for all its images",
            features=lambda seen: (
                seen.student[:1].expand_as(seen.student),
                seen.teacher[:1].expand_as(seen.teacher),
            ),
        ),
        Attack(
            "swapped_classes",
            "each class with the next one's teacher features",
            features=lambda seen: (
                seen.student,
                _as_class(seen, lambda own, classes: (own + 1) % classes),
            ),
        ),
        Attack(
            "backdoor",
            "images with a pattern as if they were of one class",
            features=_backdoor,
            stamps=True,
        ),
    )
}


def stamped(images: Tensor, white: float) -> Tensor:
    """Return the images with the pattern of a backdoor."""
    side = max(2, images.shape[-1] // PATTERN)
    changed = images.clone()
    changed[..., -side:, -side:] = white
    return changed


def poisoned_state(attack: Attack, state: State, known: Known) -> State:
    """Return the state to send."""
    if attack.state is None:
        return state
    generator, poisoned = torch.Generator().manual_seed(0), dict(state)
    for name, value in state.items():
        if value.is_floating_point() and (attack.variances or not name.endswith("running_var")):
            received, first, learnt = (
                one[name].to(value.device) for one in (known.received, known.first, known.learnt)
            )
            sent = Weights(value, received, first, learnt, generator, name, known)
            poisoned[name] = attack.state(sent)
    return poisoned


# --- fleets with attackers ---------------------------------------------------------------------------


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
        between: Callable[[], None] = lambda: None,
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
