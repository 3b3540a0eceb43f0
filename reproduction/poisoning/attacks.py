"""Poisoning attacks: what malicious clients send in place of honest values.

An `Attack` changes only what leaves a client, so it works with every method and needs no code in any. In
a simulation some local clients are attackers (`reproduction.poisoning.fleet`). They see more than real
attackers could: the features of the others and the true classes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from semisfl.fleet.base import Features, State

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


def _alternating(weights: Weights) -> Tensor:
    sign = 1 if weights.known.round % 2 else -1
    return weights.received + sign * 4 * (weights.trained - weights.received)


def _mirrored(weights: Weights) -> Tensor:
    """Return a drift of nine times the length; attackers with odd and even numbers cancel each other."""
    sign = 1 if weights.known.client % 2 else -1
    return weights.received + sign * 9 * (_drifted(weights) - weights.received)


def _scaled(sight: Sight) -> Pair:
    return 9 * sight.student, 9 * sight.teacher


def _negated(sight: Sight) -> Pair:
    return -sight.student, -sight.teacher


def _one_image(sight: Sight) -> Pair:
    """Return one image's features for all rows, so that all rows have its class."""
    return tuple(rows[:1].expand_as(rows) for rows in (sight.student, sight.teacher))  # type: ignore[return-value]


def _noise(sight: Sight) -> Pair:
    """Return noise with the mean, deviation and minimum of honest features."""

    def like(features: Tensor) -> Tensor:
        drawn = torch.randn(features.shape, generator=sight.generator, device=features.device)
        return (drawn * features.std() + features.mean()).clamp(min=float(features.min()))

    return like(sight.student), like(sight.teacher)


def _copied(sight: Sight) -> Pair:
    return sight.step.student.detach()[sight.others], sight.step.teacher[sight.others]


def _replayed(sight: Sight) -> Pair:
    return sight.first.student.detach()[sight.rows], sight.first.teacher[sight.rows]


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


def _swapped(sight: Sight) -> Pair:
    return sight.student, _as_class(sight, lambda own, classes: (own + 1) % classes)


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
            state=_alternating,
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
        Attack("scaled_features", "its features times 9", features=_scaled),
        Attack(
            "negated_features_late",
            "its features times -1 in the last two rounds",
            features=_negated,
            late=True,
        ),
        Attack("noise_features", "features drawn at random", features=_noise),
        Attack("copied_features", "the features of another client", features=_copied),
        Attack("replayed_features", "the features of the round's first step", features=_replayed),
        Attack("one_class", "one image's features for all its images", features=_one_image),
        Attack(
            "swapped_classes", "each class with the next one's teacher features", features=_swapped
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
