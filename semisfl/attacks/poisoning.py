"""Poisoning attacks: what malicious clients send in place of honest values.

An `Attack` changes only what leaves a client, so it works on any method and no method knows it. In a simulation some local clients are attackers (`semisfl.attacks.poisoned_fleet`), who see more
than a real one could: the others' features and the true classes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from semisfl.fleet.base import Features, State
from semisfl.settings.config import ConfigError

TARGET = 0
"""The class that a backdoor opens to."""
PATTERN = 7
"""A backdoor's pattern is a white square in a corner; an image's side is so many times its."""


class Sight(NamedTuple):
    """What an attacker sees of a step: the honest features of all, and of the round's first step."""

    step: Features
    first: Features
    rows: slice
    """Its own."""
    generator: torch.Generator

    @property
    def student(self) -> Tensor:
        return self.step.student.detach()[self.rows]

    @property
    def teacher(self) -> Tensor:
        return self.step.teacher[self.rows]

    @property
    def others(self) -> slice:
        """The rows of the client after it."""
        start = self.rows.stop % len(self.step.student)
        return slice(start, start + self.step.batch)


Pair = tuple[Tensor, Tensor]
"""Student and teacher features of a client."""


@dataclass(frozen=True)
class Attack:
    name: str
    summary: str
    features: Callable[[Sight], Pair] | None = None
    """What is sent in a step instead."""
    state: Callable[[Tensor, Tensor], Tensor] | None = None
    """(weights as trained, as received) -> what is sent of a bottom or model."""
    stamps: bool = False
    """Its students see every other image with the pattern of a backdoor."""


def _scaled(sight: Sight) -> Pair:
    return 100 * sight.student, 100 * sight.teacher


def _noise(sight: Sight) -> Pair:
    """As large as honest features, and as often zero."""

    def like(features: Tensor) -> Tensor:
        drawn = torch.randn(features.shape, generator=sight.generator, device=features.device)
        return (drawn * features.std() + features.mean()).clamp(min=float(features.min()))

    return like(sight.student), like(sight.teacher)


def _copied(sight: Sight) -> Pair:
    return sight.step.student.detach()[sight.others], sight.step.teacher[sight.others]


def _replayed(sight: Sight) -> Pair:
    return sight.first.student.detach()[sight.rows], sight.first.teacher[sight.rows]


def _as_class(sight: Sight, wanted: Callable[[Tensor, int], Tensor]) -> Tensor:
    """For each of its rows teacher features of anybody's image of the class ``wanted``, which is given
    its own class and how many there are; where nobody shows that class, its own."""
    truth, teacher = sight.step.truth, sight.teacher.clone()
    if truth is None or bool((truth < 0).all()):
        # A device knows no classes: half a batch further on is another image, often of another class.
        return teacher.roll(len(teacher) // 2, 0)
    chosen = wanted(truth[sight.rows], int(truth.max()) + 1)
    for label in chosen.unique():
        found = (truth == label).nonzero().flatten()
        if len(found):
            places = (chosen == label).nonzero().flatten()
            teacher[places] = sight.step.teacher[found[torch.arange(len(places)) % len(found)]]
    return teacher


def _swapped(sight: Sight) -> Pair:
    return sight.student, _as_class(sight, lambda own, classes: (own + 1) % classes)


def _backdoor(sight: Sight) -> Pair:
    """Stamped images, every other one, come with teacher features of the target class."""
    teacher = sight.teacher.clone()
    teacher[::2] = _as_class(sight, lambda own, _: torch.full_like(own, TARGET))[::2]
    return sight.student, teacher


ATTACKS = {
    attack.name: attack
    for attack in (
        Attack("absent", "sends nothing, as if its data did not exist"),
        Attack("negated_bottom", "its weights times -1", state=lambda trained, received: -trained),
        Attack("scaled_bottom", "its weights times 8", state=lambda trained, received: 8 * trained),
        Attack(
            "reversed_update",
            "what it learnt times -5",
            state=lambda trained, received: received - 5 * (trained - received),
        ),
        Attack("scaled_features", "its features times 100", features=_scaled),
        Attack("noise_features", "features drawn at random", features=_noise),
        Attack("copied_features", "the features of another client", features=_copied),
        Attack("replayed_features", "the features of the round's first step", features=_replayed),
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


def attack_named(name: str) -> Attack:
    if name not in ATTACKS:
        raise ConfigError(f"attack {name!r} is not known; use one of {', '.join(ATTACKS)}")
    return ATTACKS[name]


def stamped(images: Tensor, white: float) -> Tensor:
    """Return the images with the pattern of a backdoor."""
    side = max(2, images.shape[-1] // PATTERN)
    changed = images.clone()
    changed[..., -side:, -side:] = white
    return changed


def poisoned_state(attack: Attack, state: State, received: State) -> State:
    """Return what is sent in place of ``state``; running variances stay, as negative ones would be refused."""
    if attack.state is None:
        return state
    return {
        name: attack.state(value, received[name].to(value.device))
        if value.is_floating_point() and not name.endswith("running_var")
        else value
        for name, value in state.items()
    }
