"""Derive random draws from their purpose, never from how far a stream was read."""

import hashlib
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)


def derive(seed: int, *purpose: int | str) -> int:
    """Return a 63-bit seed for one purpose, e.g. ``derive(seed, "batches", round_index, client)``."""
    text = repr((int(seed), *purpose)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


def generator(seed: int, *purpose: int | str) -> np.random.Generator:
    """Return a new generator for one purpose; the same arguments always give the same draws."""
    return np.random.Generator(np.random.Philox(derive(seed, *purpose)))


class Streams:
    """Many generators in one, whose draws are made together; each stream follows from its own seed alone.

    Value j of a stream is SplitMix64 (Steele, Lea and Flood 2014) of its seed plus j steps, so a stream gives the same
    values alone and among any others. It has the two methods of numpy's generators that augmentation uses; the first
    axis of ``size`` counts the streams.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        """``seeds``: one 63-bit seed per stream, as `derive` gives them."""
        self._seeds = np.array(seeds, np.uint64)[:, None]
        self._read = 0

    def random(self, size: Sequence[int]) -> np.ndarray:
        """Return floats from 0 up to, not with, 1."""
        first = self._read + 1
        self._read += prod(size[1:])
        state = self._seeds + np.arange(first, self._read + 1, dtype=np.uint64) * _STEP
        for shift, factor in _MIX:
            state = (state ^ (state >> shift)) * factor
        return ((state ^ (state >> np.uint64(31))) >> np.uint64(11)).reshape(size) * 2.0**-53

    def integers(
        self,
        low: int,
        high: int | None = None,
        *,
        size: Sequence[int],
        dtype: Any,
        endpoint: bool = False,
    ) -> np.ndarray:
        """Return integers from ``low`` up to ``high``, which is one of them with ``endpoint``; without ``high`` from 0 to ``low``."""
        first, end = (0, low) if high is None else (low, high + endpoint)
        return (first + np.floor(self.random(size) * (end - first))).astype(dtype)
