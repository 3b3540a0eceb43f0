"""The metrics of a whole round, and their form in a file.

A file has one JSON object per round and line. Keys without a value are left out, so files of this and other versions
are read alike: an unknown key is a metric of the run's method if it is a number, and ignored otherwise.
"""

# ruff: noqa: RUF009 (each metric is a field of its own)

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Self

from semisfl.metrics.declaration import Panel, metric
from semisfl.metrics.method_metrics import WITH_CLIENTS, MethodMetrics

ACCURACY_OF = "accuracy_"
"""In a file, before the name of a tested model."""
SECONDS = Panel("Seconds per round", "s", in_picture=False)
_test = partial(metric, section="Test", unit="percent")
_cost = partial(metric, section="Cost")


@dataclass(frozen=True, kw_only=True)
class RoundMetrics(MethodMetrics):
    """The metrics of a round as sinks get them: one line of ``metrics.jsonl``.

    It has what the method reported, and what the run adds: the test, the bytes sent, the seconds and the warnings.
    """

    round: int = field(
        metadata={"metric": {"meaning": "the round's index h, from 0", "gauge": None}}
    )
    accuracy: float | None = _test(
        "test images, or with `data.validation` the images set aside, classified correctly by the method's result: "
        "the teacher in SemiSFL, FedSwitch and FedSwitch-SL, the student in Supervised-only, the only model elsewhere",
        gauge=None,
        missing="round not tested (`runtime.evaluate_every`; the last one always is)",
    )
    accuracies: dict[str, float] = _test(
        "the same of each tested model by name: `accuracy_teacher`, `accuracy_student`",
        key="accuracy_<model>",
        by_name=True,
        gauge="accuracy_ratio{model}",
        missing="as `accuracy`",
    )
    test_accuracy: float | None = _test(
        "test images classified correctly by the method's result",
        gauge=None,
        missing="`data.validation` is not set (`accuracy` is it), or not the run's last round",
    )
    macro_f1: float | None = _test(
        "the mean F1 score of the classes that have images, of the same model on the same images as `accuracy`; a class that is "
        "never recognised counts as 0",
        panel=Panel("Macro-F1: mean over classes", "%", in_picture=False),
        gauge="macro_f1_percent",
        missing="as `accuracy`",
    )
    recall_by_class: list[float | None] | None = _test(
        "list: for each class, the share of its images that this model classified correctly; `null`: it has no image",
        gauge=None,
        missing="as `accuracy`",
    )
    held_back: dict[str, str] | None = metric(
        "object: for each client, by its number, why its part in the round was limited: by `robust.aggregate`, by "
        "`robust.features`, or because the server did not believe its values",
        unit="text",
        methods=WITH_CLIENTS,
        gauge=None,
        missing="no client was limited, or no such rule is set",
    )
    bytes: dict[str, int] | None = _cost(
        "object: bytes that crossed the wire, or in a simulation would have, **since the run's start**, by kind "
        "(`model`, `teacher`, `features`, `gradients`) and direction: `model_down`, `features_up`, ...; tensors as "
        "encoded, without the frames around them",
        unit="bytes",
        gauge="sent_bytes_total{kind, direction}",
        missing="always there; `{}` if nothing was ever sent",
    )
    bytes_total: int | None = _cost(
        "the sum of `bytes`",
        unit="bytes",
        gauge=None,
        panel=Panel("Sent since the start", "GB", 1e-9, in_picture=False),
    )
    bytes_by_client: list[dict[str, Any]] | None = _cost(
        "list: what crossed **in this round**, its undone attempts included, by client: "
        '`{"clients": [0, 3], "model_down": ..., ...}` for all clients with the same bytes, each of them',
        unit="bytes",
        methods=WITH_CLIENTS,
        missing="nothing crossed",
        gauge=None,
    )
    bytes_repeated: int | None = _cost(
        "what undone and repeated attempts at rounds sent, **since the run's start**; not in `bytes`",
        unit="bytes",
        gauge="repeated_bytes",
        missing="no round was repeated yet",
    )
    seconds: float | None = _cost(
        "the whole round: saving its start, training, test; not the wait for devices before it",
        unit="seconds",
        panel=SECONDS,
        gauge="last_round_seconds",
    )
    seconds_training: float | None = _cost(
        "of it, the method's round: server and clients",
        unit="seconds",
        gauge="last_round_training_seconds",
        panel=SECONDS,
        line="training",
    )
    seconds_testing: float | None = _cost(
        "of it, the test",
        unit="seconds",
        missing="round not tested",
        panel=SECONDS,
        line="test",
        gauge="last_round_testing_seconds",
    )
    warnings: list[str] | None = metric(
        "list: what shows since this round that the run cannot work as it is, each with what to change",
        unit="text",
        gauge=None,
        missing="nothing new",
    )
    diverged: bool | None = metric(
        "`true`: losses or weights are NaN or Inf after this round, which ended the run",
        gauge=None,
        missing="the round was good",
    )
    stopped_by: str | None = _cost(
        "the limit that this round met, which ended the run: `target`, `patience`, `hours` or `gigabytes` of `stop`; "
        "a run that went on beyond it keeps the key in this round",
        gauge=None,
        missing="the run goes on, or its rounds were all done",
    )
    own: dict[str, float] = field(default_factory=dict)
    """Metrics that only this run's method has, by key."""

    @classmethod
    def of(cls, reported: MethodMetrics, **values: Any) -> Self:
        """Return what a method reported with the other ``values`` of its round.

        Fields that only the method's own subclass of `MethodMetrics` has become entries of ``own``.
        """
        shared = {item.name for item in fields(MethodMetrics)}
        own = {
            key: value
            for key, value in vars(reported).items()
            if key not in shared and value is not None
        }
        return cls(**{key: getattr(reported, key) for key in shared}, own=own, **values)

    def with_test(self, seconds: float) -> Self:
        """Return the metrics with the seconds of a test added."""
        return replace(
            self,
            seconds=(self.seconds or 0.0) + seconds,
            seconds_testing=(self.seconds_testing or 0.0) + seconds,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain values by key, as a file has them; keys without a value are left out."""
        values: dict[str, Any] = {"round": self.round}
        for key in KEYS:
            if (value := getattr(self, key)) is not None:
                values[key] = value
            if key == "accuracy":
                values |= {ACCURACY_OF + name: one for name, one in self.accuracies.items()}
        return self.own | values

    def numbers(self) -> dict[str, float]:
        """Return the values that are plain numbers, by key, without the round."""
        return {k: v for k, v in self.as_dict().items() if _is_number(v) and k != "round"}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the metrics that `as_dict` wrote, in this, an older or a newer version.

        Raises ValueError for values without the index of a round.
        """
        if not isinstance(values, Mapping) or not isinstance(values.get("round"), int):
            raise ValueError("it has no round")
        known = {key: values[key] for key in KEYS if key in values}
        others = {key: values[key] for key in values if key not in known and key != "round"}
        accuracies = {
            key.removeprefix(ACCURACY_OF): value
            for key, value in others.items()
            if key.startswith(ACCURACY_OF)
        }
        own = {
            key: value
            for key, value in others.items()
            if _is_number(value) and not key.startswith(ACCURACY_OF)
        }
        return cls(round=values["round"], accuracies=accuracies, own=own, **known)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


KEYS = tuple(
    item.name for item in fields(RoundMetrics) if item.name not in ("round", "accuracies", "own")
)
