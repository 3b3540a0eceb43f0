"""The learning rate of a round."""

import math

import pytest

from semisfl.algorithm.schedule import learning_rate
from semisfl.settings.run import OptimizerConfig


def test_cosine_by_hand() -> None:
    config = OptimizerConfig(lr=0.02, lr_min=0.005)
    assert learning_rate(config, 0, 1000) == pytest.approx(0.02)
    assert learning_rate(config, 500, 1000) == pytest.approx((0.02 + 0.005) / 2)
    assert learning_rate(config, 250, 1000) == pytest.approx(0.005 + 0.0075 * (1 + math.sqrt(0.5)))
    assert learning_rate(config, 1000, 1000) == pytest.approx(0.005)


def test_the_rate_stays_after_the_last_round() -> None:
    config = OptimizerConfig(lr=0.02, lr_min=0.005)
    assert learning_rate(config, 5, 10) == pytest.approx(0.0125)
    assert learning_rate(config, 10, 10) == learning_rate(config, 15, 10) == pytest.approx(0.005)
