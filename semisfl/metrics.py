"""The rows of a run's files: its rounds, and what happened to its fleet. ``docs/metrics.md`` defines each key."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

ACCURACY_OF = "accuracy_"
"""In a file, before the name of a tested model."""


@dataclass(frozen=True, kw_only=True)
class MethodMetrics:
    """What a method reports of a round, the same for all; None: this round has no such value."""

    learning_rate: float | None = None
    supervised_steps: int | None = None
    loss_supervised: float | None = None
    loss_supervised_contrast: float | None = None
    loss_semi: float | None = None
    loss_consistency: float | None = None
    loss_clustering: float | None = None
    contributing: int | None = None
    labelled_by_teacher: float | None = None
    mask_rate: float | None = None
    impurity: float | None = None
    coverage_by_class: list[float | None] | None = None
    coverage_by_client: dict[str, float | None] | None = None


@dataclass(frozen=True, kw_only=True)
class RoundMetrics(MethodMetrics):
    """A round as it is written to sinks: one line of ``metrics.jsonl``."""

    round: int
    accuracy: float | None = None
    accuracies: dict[str, float] = field(default_factory=dict)
    """By tested model; in a file one key per model, ``accuracy_<model>``."""
    test_accuracy: float | None = None
    """In a run's last round, where rounds are judged on other images than the test set's."""
    held_back: dict[str, str] | None = None
    bytes: dict[str, int] | None = None
    bytes_total: int | None = None
    bytes_by_client: list[dict[str, Any]] | None = None
    bytes_repeated: int | None = None
    seconds: float | None = None
    seconds_training: float | None = None
    seconds_testing: float | None = None
    stopped_by: str | None = None
    """The key of ``stop`` that was met, in a run's last round."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values by key, as a file has them: what is None is left out."""
        values: dict[str, Any] = {"round": self.round}
        for key in KEYS:
            if (value := getattr(self, key)) is not None:
                values[key] = value
            if key == "accuracy":
                values |= {ACCURACY_OF + name: one for name, one in self.accuracies.items()}
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The row that `as_dict` wrote, now or in an older or newer version: what it lacks is None."""
        if not isinstance(values, Mapping) or not isinstance(values.get("round"), int):
            raise ValueError("it has no round")
        known = {key: values[key] for key in KEYS if key in values}
        accuracies = {
            key.removeprefix(ACCURACY_OF): value
            for key, value in values.items()
            if key.startswith(ACCURACY_OF)
        }
        return cls(round=values["round"], accuracies=accuracies, **known)


KEYS = tuple(item.name for item in fields(RoundMetrics) if item.name not in ("round", "accuracies"))


@dataclass(frozen=True, kw_only=True)
class FleetEvent:
    """Something that happened to one device: one line of ``fleet.jsonl``."""

    time: str
    event: str
    """``here``, ``gone``, ``left_out``, ``held_back`` or ``refused``."""
    name: str
    client: int | None = None
    images: int | None = None
    peer: str | None = None
    reason: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class DeviceStatus:
    """A device that has a place, as it stands: one entry of ``fleet.json``."""

    client: int
    name: str
    images: int | None = None
    since: str | None = None
    """When it came; None: it is not here."""
    seen: str | None = None
    """When it was last heard of."""
    bytes_up: int = 0
    bytes_down: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if value is not None}


MethodRow, RoundRow = MethodMetrics, RoundMetrics
"""Earlier names, which methods and sinks of other packages may still import."""
