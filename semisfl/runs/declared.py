"""List the metrics of runs: those that every run has, then those of their methods.

A metric is declared at the field of a dataclass, with its meaning, unit and chart; readers such as pictures, the page
and the exporter show whatever is declared here.
"""

import logging
from collections.abc import Iterable
from dataclasses import fields

from semisfl.metrics import MethodMetrics, Metric, Panel, RoundMetrics, declared
from semisfl.settings import lookup
from semisfl.settings.sections import ConfigError

log = logging.getLogger(__name__)


def metrics_of(methods: Iterable[str], keys: Iterable[str] = ()) -> dict[str, Metric]:
    """Return the metrics by key; a key of ``keys`` that nobody here declares gets a panel of its name."""
    known = {one.key: one for one in declared(RoundMetrics)}
    for method in dict.fromkeys(methods):
        for one in own_metrics(method):
            known.setdefault(one.key, one)
    for key in keys:
        known.setdefault(key, undeclared(key))
    return known


def own_metrics(method: str) -> list[Metric]:
    """Return what only this method declares; nothing if its package is not installed here."""
    shared = {item.name for item in fields(MethodMetrics)}
    try:
        kind = lookup.metrics_class(method)
        metrics = [] if kind is None else declared(kind)
    except (ConfigError, TypeError) as error:  # another package's mistake must not hide the run
        log.warning("the metrics of %s are shown without their declarations: %s", method, error)
        return []
    return [one for one in metrics if one.key not in shared]


def undeclared(key: str) -> Metric:
    """Return what can be said of a metric whose package is not installed here."""
    title = key.replace("_", " ").capitalize()
    return Metric(key=key, meaning="a metric of the run's method", panel=Panel(title))
