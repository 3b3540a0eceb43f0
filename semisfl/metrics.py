"""The metrics of a round, each declared once, and what happens to a fleet's devices.

A field of `MethodMetrics` or `RoundMetrics` is a metric: its name is the key in ``metrics.jsonl``, and `metric` says
what it means and how it is drawn. docs/metrics.md, the page, pictures, Prometheus and TensorBoard read the fields.
"""

# ruff: noqa: RUF009 (each metric is a field of its own)

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Self

ACCURACY_OF = "accuracy_"
"""In a file, before the name of a tested model."""
LOSS = "loss_"
"""Before the name of a loss."""


@dataclass(frozen=True)
class Axis:
    """The x axis of a chart: a metric times ``scale`` plus ``first``, or its running sum."""

    title: str
    key: str
    scale: float = 1.0
    first: float = 0.0
    summed: bool = False


AXES = (
    Axis("rounds", "round", first=1.0),
    Axis("GB sent", "bytes_total", 1e-9),
    Axis("minutes", "seconds", 1 / 60, summed=True),
)


@dataclass(frozen=True)
class Panel:
    """One chart over rounds. Metrics that name the same panel are its lines."""

    title: str
    unit: str = ""
    scale: float = 1.0
    """Multiplies the values: 100 shows a share in percent."""
    in_picture: bool = True
    """Whether `semisfl report` draws it; the page draws every panel."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """The declaration of one key of ``metrics.jsonl``."""

    key: str
    meaning: str = ""
    unit: str = ""
    missing: str = "always there"
    """When a round has no value."""
    methods: str = "all"
    """Titles of the methods that report it, as docs/metrics.md writes them."""
    section: str = "Training"
    """The heading of docs/metrics.md under which it stands."""
    panel: Panel | None = None
    line: str = ""
    """Its name within the panel; empty: the whole, of which the others are parts."""
    gauge: str | None = ""
    """Its name for Prometheus after ``semisfl_``; empty: the key, or a term of ``loss``; None: it has no gauge."""

    @property
    def prometheus(self) -> str | None:
        """Return the full name for Prometheus, with its labels in braces."""
        if self.gauge == "" and self.key.startswith(LOSS):
            return "semisfl_loss{term}"
        return None if self.gauge is None else f"semisfl_{self.gauge or self.key}"


def metric(meaning: str, **about: Any) -> Any:
    """Return a dataclass field that is a metric; ``about`` has further values of `Metric`."""
    default = {"default_factory": dict} if about.pop("by_name", False) else {"default": None}
    return field(**default, metadata={"metric": {"meaning": meaning, **about}})


def declared(kind: type) -> list[Metric]:
    """Return the metrics among the fields of a class, in their order."""
    return [
        Metric(**{"key": item.name, **item.metadata["metric"]})
        for item in fields(kind)
        if "metric" in item.metadata
    ]


def panels_of(metrics: Iterable[Metric]) -> dict[Panel, list[Metric]]:
    """Return the lines of every panel that a metric names."""
    panels: dict[Panel, list[Metric]] = {}
    for one in metrics:
        if one.panel is not None:
            panels.setdefault(one.panel, []).append(one)
    return panels


LABELLED = Panel("Loss on labelled images", "nats")
UNLABELLED = Panel("Loss on unlabelled images", "nats")
SECONDS = Panel("Seconds per round", "s", in_picture=False)
SHARE = "0 to 1"
WITH_CLIENTS = "all but Supervised-only"
NO_CLIENTS = "no clients this round"
_loss = partial(metric, section="Losses", unit="nats")
_label = partial(metric, section="Pseudo-labels", unit=SHARE, methods=WITH_CLIENTS)
_test = partial(metric, section="Test", unit="percent")
_cost = partial(metric, section="Cost")


@dataclass(frozen=True, kw_only=True)
class MethodMetrics:
    """A method's report of a round; None: this round has no such value.

    A method of another package adds its own metrics as fields of a subclass.
    """

    loss_supervised: float | None = _loss(
        "on labelled images: cross-entropy, in SemiSFL H + T. FedMatch: without its weight λ_s",
        panel=LABELLED,
    )
    loss_supervised_contrast: float | None = _loss(
        "T, the contrastive part of `loss_supervised`; 0 with `semisfl.supervised_contrast = false`",
        methods="SemiSFL",
        panel=LABELLED,
        line="contrastive part",
    )
    loss_semi: float | None = _loss(
        "on unlabelled images, all terms with their weights: `loss_consistency`, and in SemiSFL the clustering term, in "
        "SemiFL the term of mixed images, in FedMatch helpers' consistency; without FedMatch's penalties on weights",
        methods=WITH_CLIENTS,
        missing=NO_CLIENTS,
        panel=UNLABELLED,
    )
    loss_consistency: float | None = _loss(
        "the part of `loss_semi` that is cross-entropy of strongly augmented images with their pseudo-labels",
        methods=WITH_CLIENTS,
        missing=NO_CLIENTS,
        panel=UNLABELLED,
        line="consistency",
    )
    loss_clustering: float | None = _loss(
        "C, the part of `loss_semi` that is clustering regularisation; 0 with `semisfl.clustering = false`",
        methods="SemiSFL",
        missing=NO_CLIENTS,
        panel=UNLABELLED,
        line="clustering",
    )
    supervised_steps: int | None = metric(
        "steps on labelled images, K_s; changes only where a controller adapts it",
        unit="steps",
        panel=Panel("Supervised steps per round, Kₛ", "steps"),
    )
    mask_rate: float | None = _label(
        "1 − kept / labelled images; full-model methods: 1 − mean over clients of (kept / labelled images of the "
        "client)",
        missing=NO_CLIENTS,
        panel=Panel("Mask rate: pseudo-labels not kept", "%", 100),
        gauge="mask_ratio",
    )
    impurity: float | None = _label(
        "wrong labels / kept labels, over all clients, of images whose true label is known",
        missing=f"{NO_CLIENTS}, none kept, or no true label known: always so with real devices",
        panel=Panel("Impurity: kept labels that are wrong", "%", 100),
        gauge="impurity_ratio",
    )
    coverage_by_class: list[float | None] | None = _label(
        "list: for each true class kept / labelled images, over all clients; `null`: no image of it was labelled",
        gauge=None,
        missing=f"{NO_CLIENTS}, or no true label known: always so with real devices",
    )
    coverage_by_client: dict[str, float | None] | None = _label(
        "object: for each client, by its number, kept / labelled images; split methods: `null` for a client that "
        "was chosen and did not answer",
        missing=NO_CLIENTS,
        gauge=None,
    )
    contributing: int | None = metric(
        "split methods: clients that answered every step of the round; others: clients that sent a model back (in "
        "SemiFL a client without a confident label has nothing to send)",
        unit="clients",
        methods=WITH_CLIENTS,
        missing=NO_CLIENTS,
        panel=Panel("Clients that contributed", "clients", in_picture=False),
    )
    labelled_by_teacher: float | None = metric(
        "share of the clients whose pseudo-labels came from the teacher, not from their student",
        unit=SHARE,
        methods="FedSwitch, FedSwitch-SL",
        missing=NO_CLIENTS,
        panel=Panel("Clients labelled by the teacher", "%", 100, in_picture=False),
        gauge="labelled_by_teacher_ratio",
    )
    learning_rate: float | None = metric(
        "η_min + (η − η_min)(1 + cos(π h / H)) / 2, the same for server and clients, constant within a round",
        panel=Panel("Learning rate", in_picture=False),
    )


@dataclass(frozen=True, kw_only=True)
class RoundMetrics(MethodMetrics):
    """The metrics of a round as sinks get them: one line of ``metrics.jsonl``."""

    round: int = field(
        metadata={"metric": {"meaning": "the round's index h, from 0", "gauge": None}}
    )
    accuracy: float | None = _test(
        "test images, or with `data.validation` the images set aside, classified correctly by the method's result: "
        "the teacher in SemiSFL, FedSwitch and FedSwitch-SL, the only model elsewhere",
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
        """Return what a method reported with the other ``values`` of its round."""
        shared = {item.name for item in fields(MethodMetrics)}
        own = {
            key: value
            for key, value in vars(reported).items()
            if key not in shared and value is not None
        }
        return cls(**{key: getattr(reported, key) for key in shared}, own=own, **values)

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
        """Return the metrics that `as_dict` wrote, in this, an older or a newer version."""
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
    return isinstance(value, int | float)


KEYS = tuple(
    item.name for item in fields(RoundMetrics) if item.name not in ("round", "accuracies", "own")
)


MethodRow, RoundRow = MethodMetrics, RoundMetrics
"""Earlier names, which methods and sinks of other packages may still import."""
