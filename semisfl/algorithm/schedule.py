"""The learning rate of a round, for server and clients alike."""

import math

from semisfl.settings.run import OptimizerConfig


def learning_rate(config: OptimizerConfig, round_index: int, rounds: int) -> float:
    """Return eta_min + (eta - eta_min)(1 + cos(pi h / H)) / 2, constant within a round."""
    phase = math.cos(math.pi * min(round_index, rounds) / rounds)
    return config.lr_min + 0.5 * (config.lr - config.lr_min) * (1 + phase)
