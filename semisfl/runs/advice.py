"""Notice in the metrics that a run cannot work as it is, and say what to change. Loads no torch."""

import math
from collections.abc import Iterator
from typing import Any

from semisfl.metrics import RoundMetrics
from semisfl.settings.config import Config, ConfigError
from semisfl.settings.counts import counted
from semisfl.settings.sections import needed_confidence

DIVERGED = 4
"""Exit code of a command whose run ended with NaN, or with losses or weights out of bounds."""
ROUNDS = 5
"""Rounds in a row without a confident image, and rounds over which losses are averaged."""
FEWEST = 10
"""Accuracies and labels are judged after a tenth of the rounds, but not before this many."""
BETTER_THAN_CHANCE = 1.2
"""An accuracy up to this multiple of chance is no better than guessing."""
RISE = 2.0
"""A loss rises if its mean is this multiple of its lowest mean, and higher by `LEAST_RISE`."""
LEAST_RISE = 0.5
NOTHING_TO_GAIN = 99.0
"""From this accuracy on, a run that does not improve is as good as it can be."""

SMALL_TEMPERATURE = 0.05
"""The gradients of the contrastive terms grow as the temperature falls; the paper has 0.2."""


class Advice:
    """Look at each round after the ones before it. Every warning comes once per run."""

    def __init__(self, config: Config, classes: int) -> None:
        self._config, self._classes, self._chance = config, classes, 100 / classes
        self._unsure = 0
        """Rounds in a row without a confident image."""
        self._best, self._labels_alone = 0.0, 0.0
        """Highest accuracy of rounds with clients, and of the rounds before them."""
        self._early, self._late = 0.0, 0.0
        """Highest accuracy of the first rounds with clients, and of the rounds after them."""
        self._several_classes = False
        """Whether images of two classes were recognised in one test, or no test says."""
        self._with_clients = False
        self._losses: list[float] = []
        self._lowest = math.inf
        self._warned: set[str] = set()

    def after(self, metrics: RoundMetrics) -> list[str]:
        """Return the new warnings of this round; a diverged round has none, as divergence explains it."""
        if metrics.diverged:
            return []
        self._look(metrics)
        new = {
            key: text for key, text in self._warnings(metrics.round + 1) if key not in self._warned
        }
        self._warned |= new.keys()
        return list(new.values())

    def _look(self, metrics: RoundMetrics) -> None:
        if metrics.mask_rate is not None or metrics.contributing is not None:
            self._with_clients = True
            some = metrics.contributing != 0 and (metrics.mask_rate or 0.0) < 1
            self._unsure = 0 if some else self._unsure + 1
        accuracy = metrics.accuracy or 0.0
        recalls = [recall for recall in metrics.recall_by_class or () if recall is not None]
        if metrics.accuracy is not None and (len(recalls) < 2 or sum(map(bool, recalls)) > 1):
            self._several_classes = True
        if metrics.round < self._config.server.pretrain_rounds:
            self._labels_alone = max(self._labels_alone, accuracy)
        else:
            self._best = max(self._best, accuracy)
            if metrics.round < self._first_rounds:
                self._early = max(self._early, accuracy)
            else:
                self._late = max(self._late, accuracy)
        if metrics.loss_supervised is not None and math.isfinite(metrics.loss_supervised):
            self._losses = [*self._losses, metrics.loss_supervised][-ROUNDS:]
            if len(self._losses) == ROUNDS:
                self._lowest = min(self._lowest, self._mean_loss)

    @property
    def _first_rounds(self) -> float:
        return max(FEWEST, self._config.rounds / 10)

    @property
    def _mean_loss(self) -> float:
        return sum(self._losses) / len(self._losses)

    def _warnings(self, done: int) -> Iterator[tuple[str, str]]:
        config = self._config
        lr = f"optimizer.lr = {config.optimizer.lr:g}"
        threshold = _threshold(config, self._classes)
        early = done < self._first_rounds
        if self._unsure >= ROUNDS and not early:
            yield (
                "unsure",
                f"no image was confident for {ROUNDS} rounds, so the clients learn nothing; "
                f"lower {threshold}, {_more_labels(config)}, or raise server.steps",
            )
        if self._losses and self._mean_loss > max(RISE * self._lowest, self._lowest + LEAST_RISE):
            yield (
                "rising",
                f"the supervised loss rises: {self._mean_loss:.3g} on average of {ROUNDS} rounds, up "
                f"from {self._lowest:.3g}; lower {lr}",
            )
        if early or not self._best:
            return
        if self._best <= BETTER_THAN_CHANCE * self._chance:
            yield (
                "chance",
                f"after {counted(done, 'round')} the accuracy is {self._best:.1f} %, and guessing gives "
                f"{self._chance:.1f} %; check that the labels belong to their images, or lower {lr}",
            )
        elif not self._several_classes:
            yield (
                "one class",
                f"after {counted(done, 'round')} the accuracy of {self._best:.1f} % is that of one answer for every image: "
                f"no test recognised two classes; {_for_rare_classes(config)}, or lower {lr}",
            )
        if self._best <= self._labels_alone:
            yield (
                "nothing",
                f"the clients bring nothing: {self._best:.1f} % with them, {self._labels_alone:.1f} % "
                f"with labels alone; lower clients.steps = {config.clients.steps}, or raise "
                f"{threshold} so that fewer labels are wrong",
            )
        stuck = 0 < self._late <= self._early < NOTHING_TO_GAIN
        if self._with_clients and stuck and done >= max(2 * FEWEST, config.rounds / 2):
            yield (
                "stuck",
                f"the accuracy has not risen since the first {self._first_rounds:.0f} rounds: {self._early:.1f} % "
                f"then, {self._late:.1f} % since, so more rounds with the clients bring nothing; compare with "
                f"method=supervised, raise {threshold} so that fewer labels are wrong, or "
                f"{_more_labels(config)}",
            )


def against_divergence(config: Config) -> str:
    """Return what to change if losses or weights are out of bounds."""
    fix = f"lower optimizer.lr = {config.optimizer.lr:g}"
    for name in type(config).model_fields:
        value: Any = getattr(getattr(config, name), "temperature", None)
        if value is not None and value < SMALL_TEMPERATURE:
            return f"raise {name}.temperature = {value:g}, or {fix}"
    return fix


def about_batchnorm(error: ValueError, config: Config) -> ConfigError | None:
    """Return the settings to change if ``error`` is BatchNorm's about a batch of one value per channel."""
    if "more than 1 value per channel" not in str(error):
        return None
    batches = {"clients.batch": config.clients.batch, "server.batch": config.server.batch}
    ones = " and ".join(f"{key} = 1" for key, batch in batches.items() if batch == 1)
    fix = f"set {ones} to 2 or more" if ones else "give a client two images or more"
    return ConfigError(
        f"BatchNorm cannot train on one image of 1x1 pixels: {fix}, or set data.size to a larger side"
    )


def _more_labels(config: Config) -> str:
    """Return how a run gets more labelled images: a server with devices uses all that it has."""
    network = config.fleet.kind == "network"
    return "add labelled images to --labeled" if network else "raise data.labeled"


def _for_rare_classes(config: Config) -> str:
    """Return what may teach classes that are rare: strong views can hide marks that are faint or small."""
    fixes = [f"{_more_labels(config)}, of the rarer classes too"]
    if config.labeled_view != "weak":
        fixes.append("set server.labeled_view=weak")
    if config.method != "supervised":
        fixes.append("compare with method=supervised")
    return ", ".join(fixes)


def _threshold(config: Config, classes: int) -> str:
    """Return the setting with the confidence that a pseudo-label needs, and its value."""
    for name in type(config).model_fields:
        value: Any = getattr(getattr(config, name), "confidence_threshold", None)
        if value is not None:
            return f"{name}.confidence_threshold = {needed_confidence(value, classes):g}"
    return "the method's confidence threshold"
