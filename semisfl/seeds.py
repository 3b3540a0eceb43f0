"""Derive random draws from their purpose, never from how far a stream was read."""

import hashlib

import numpy as np


def derive(seed: int, *purpose: int | str) -> int:
    """Return a 63-bit seed for one purpose, e.g. ``derive(seed, "batches", round_index, client)``."""
    text = repr((int(seed), *purpose)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


def generator(seed: int, *purpose: int | str) -> np.random.Generator:
    """Return a new generator for one purpose; the same arguments always give the same draws."""
    return np.random.Generator(np.random.Philox(derive(seed, *purpose)))
