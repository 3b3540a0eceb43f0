"""Bound how many bits about an image can be in what a device sends. Loads no torch.

A row of d values, clipped to norm 1, with independent Gaussian noise of deviation s on each value is a
Gaussian channel. It carries at most d/2 log2(1 + 1/(d s^2)) bits (Shannon 1949), whatever computed the
row. What a server learned before does not raise this (Shannon 1956), so the bits of all rows add up. A trained
bottom is one such row, and a server can plant a bottom whose upload is about a single image: what one round
tells, the next one refines (linear feedback). So an upload counts in full against each image of its round.
"""

from math import inf, log, log1p

from semisfl.settings.policy import Policy


def row_bits(values: int, noise: float) -> float:
    """Return the most bits that a row of ``values`` carries, with ``noise`` in units of its largest norm."""
    if values == 0:
        return 0.0
    # A product may become inf where a power would raise an error, or 0.
    power = values * noise * noise
    return values / 2 * log1p(1 / power) / log(2) if power > 0 else inf


def feature_bits(policy: Policy, features: int) -> float:
    """Return the most bits that one row of ``features`` values carries under a policy."""
    return row_bits(features, policy.noise if policy.clip is not None else 0.0)


def upload_bits(policy: Policy, weights: int) -> float:
    """Return the most bits that a bottom of ``weights`` values carries: all of them are one row."""
    return row_bits(weights, policy.update_noise if policy.update_clip is not None else 0.0)


def round_bits(policy: Policy, uses: int, features: int, weights: int) -> float:
    """Return the most bits about one image in a split round: ``uses`` rows of the student, as many of the teacher, and the
    whole upload, which a server can make depend on that image alone.
    """
    return 2 * uses * feature_bits(policy, features) + upload_bits(policy, weights)
