"""Keep the usual values of a run. They follow good rounds slowly, so that no single round decides them."""

from collections.abc import Mapping

PACE = 1.5
"""Largest factor by which a usual value changes after one good round."""


def followed(usual: Mapping[str, float], latest: Mapping[str, float]) -> dict[str, float]:
    """Return the usual values after a good round that had the ``latest`` ones."""
    new = {
        name: min(max(value, usual[name] / PACE), usual[name] * PACE) if usual.get(name) else value
        for name, value in latest.items()
    }
    return {**usual, **new}
