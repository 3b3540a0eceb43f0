"""Every random draw is a function of what it is for, never of how far a stream was read."""

import hashlib

import numpy as np


def derive(seed: int, *purpose: int | str) -> int:
    """A 63-bit seed for one purpose, e.g. ``derive(seed, "batches", round_index, client)``."""
    text = repr((int(seed), *purpose)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


def generator(seed: int, *purpose: int | str) -> np.random.Generator:
    """A fresh generator for one purpose; the same arguments always give the same draws."""
    return np.random.Generator(np.random.Philox(derive(seed, *purpose)))
