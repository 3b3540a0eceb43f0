"""The metrics that a method reports about its round.

All methods share one class, so that curves of different methods have the same names. A metric that makes no sense for
a method is None in its rounds.
"""

# ruff: noqa: RUF009 (each metric is a field of its own)

from dataclasses import dataclass
from functools import partial

from semisfl.metrics.declaration import Panel, metric

LABELLED = Panel("Loss on labelled images", "nats")
UNLABELLED = Panel("Loss on unlabelled images", "nats")
SHARE = "0 to 1"
WITH_CLIENTS = "all but Supervised-only"
NO_CLIENTS = "no clients this round"
_loss = partial(metric, section="Losses", unit="nats")
_label = partial(metric, section="Pseudo-labels", unit=SHARE, methods=WITH_CLIENTS)


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
        "SemiFL the term of mixed images, in (FL)² sharpness-aware consistency, in FedMatch helpers' consistency; "
        "without FedMatch's penalties on weights",
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
        "steps on labelled images, K_s; changes only where a controller adapts it, and in (FL)² after the first "
        "round, which has those of ten rounds more",
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
        "object: for each client, by its number (of devices: their place, which another device may take later), "
        "kept / labelled images; split methods: `null` for a client that was chosen and did not answer",
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
