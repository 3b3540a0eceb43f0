"""Draw the images of each step of a round."""

import numpy as np

from semisfl import seeds


def draw_batches(
    rng: np.random.Generator, count: int, steps: int, batch: int, least: int = 0
) -> np.ndarray:
    """Return positions [steps, batch] in a list of ``count``: the list, repeated often enough, shuffled.

    The published code continues one shuffle across rounds; here every round has its own, so
    that its draws do not depend on the rounds before. The shuffled pool has at least ``least``
    entries (the server's covers 100 steps in the published code).
    """
    need = max(steps * batch, least)
    pool = np.tile(np.arange(count), -(-need // count))
    return rng.permutation(pool)[: steps * batch].reshape(steps, batch)


def draw_passes(rng: np.random.Generator, count: int, steps: int, batch: int) -> np.ndarray:
    """Return positions [steps, batch] in a list of ``count`` that is passed over again and again.

    Every pass is in an order of its own. It is filled up to whole batches from its own beginning.
    """
    per_pass = -(-count // batch)
    passes = [
        np.resize(rng.permutation(count), per_pass * batch) for _ in range(-(-steps // per_pass))
    ]
    return np.concatenate(passes)[: steps * batch].reshape(steps, batch)


def draw_positions(
    seed: int, round_index: int, client: int, count: int, steps: int, batch: int
) -> np.ndarray:
    """Return which of its ``count`` images a client shows in a split round, [steps, batch]."""
    rng = seeds.generator(seed, "batches", round_index, client)
    return draw_batches(rng, count, steps, batch)
