"""Notice in the metrics that a run cannot work as it is, and say what to change. Loads no torch.

There are four warnings: no image is confident enough to get a pseudo-label, the accuracy is that of guessing, it is
that of one class, or the clients bring nothing over the labelled images alone.
"""

from collections.abc import Iterator
from typing import Any

from semisfl.metrics import RoundMetrics
from semisfl.settings.config import Config, ConfigError
from semisfl.settings.counts import plural
from semisfl.settings.sections import needed_confidence

DIVERGED = 4
"""Exit code of a command whose run ended with NaN or Inf in its losses or weights."""
UNSURE_ROUNDS = 5
"""Rounds in a row without a confident image before a warning."""
FEWEST = 10
"""Accuracies and labels are judged after a tenth of the rounds, but not before this many."""
BETTER_THAN_CHANCE = 1.2
"""An accuracy up to this multiple of chance is no better than guessing."""


class Advice:
    """Look at each round after the ones before it. Every warning comes once per run."""

    def __init__(self, config: Config, classes: int) -> None:
        """Take the run's configuration and the number of ``classes`` of its images."""
        self._config, self._classes = config, classes
        self._unsure = 0
        """Rounds in a row without a confident image."""
        self._best, self._labels_alone = 0.0, 0.0
        """Highest accuracy of rounds with clients, and of the rounds before them."""
        self._several_classes = False
        """Whether images of two classes were recognised in one test, or no test says."""
        self._warned: set[str] = set()

    def after(self, metrics: RoundMetrics) -> list[str]:
        """Return the new warnings of this round, one line each, with the settings to change.

        Rounds are given in their order. A diverged round has no warning, as divergence explains everything.
        """
        if metrics.diverged:
            return []
        if metrics.mask_rate is not None or metrics.contributing is not None:
            confident = metrics.contributing != 0 and (metrics.mask_rate or 0.0) < 1
            self._unsure = 0 if confident else self._unsure + 1
        recalls = [recall for recall in metrics.recall_by_class or () if recall is not None]
        if metrics.accuracy is not None and (len(recalls) < 2 or sum(map(bool, recalls)) > 1):
            self._several_classes = True
        if metrics.round < self._config.server.pretrain_rounds:
            self._labels_alone = max(self._labels_alone, metrics.accuracy or 0.0)
        else:
            self._best = max(self._best, metrics.accuracy or 0.0)
        done = metrics.round + 1
        if done < max(FEWEST, self._config.rounds / 10):
            return []
        new = {key: text for key, text in self._warnings(done) if key not in self._warned}
        self._warned |= new.keys()
        return list(new.values())

    def _warnings(self, done: int) -> Iterator[tuple[str, str]]:
        config, chance = self._config, 100 / self._classes
        lr, threshold = f"optimizer.lr = {config.optimizer.lr:g}", self._threshold()
        # A server with devices uses all labelled images that it has.
        network = config.fleet.kind == "network"
        more = "add labelled images to --labeled" if network else "raise data.labeled"
        if self._unsure >= UNSURE_ROUNDS:
            yield (
                "unsure",
                f"no image was confident for {UNSURE_ROUNDS} rounds, so the clients learn nothing; "
                f"lower {threshold}, {more}, or raise server.steps",
            )
        if not self._best:
            return
        about = f"after {plural(done, 'round')} the accuracy"
        if self._best <= BETTER_THAN_CHANCE * chance:
            yield (
                "chance",
                f"{about} is {self._best:.1f} %, and guessing gives {chance:.1f} %; check that the labels belong to "
                f"their images, or lower {lr}",
            )
        elif not self._several_classes:
            # Strong views can hide marks that are faint or small.
            yield (
                "one class",
                f"{about} of {self._best:.1f} % is that of one answer for every image: no test recognised two "
                f"classes; {more}, of the rarer classes too, set server.labeled_view=weak, or lower {lr}",
            )
        if self._best <= self._labels_alone:
            yield (
                "nothing",
                f"the clients bring nothing: {self._best:.1f} % with them, {self._labels_alone:.1f} % "
                f"with labels alone; lower clients.steps = {config.clients.steps}, or raise "
                f"{threshold} so that fewer labels are wrong",
            )

    def _threshold(self) -> str:
        """Return the setting with the confidence that a pseudo-label needs, and its value."""
        for name, section in self._config:
            value: Any = getattr(section, "confidence_threshold", None)
            if value is not None:
                return f"{name}.confidence_threshold = {needed_confidence(value, self._classes):g}"
        return "the method's confidence threshold"


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
