"""The metrics of a round, each declared once.

A field of `MethodMetrics` or `RoundMetrics` is a metric: its name is the key in ``metrics.jsonl``, and `metric` says
what it means and how it is drawn. docs/watching.md, the page, pictures, Prometheus and TensorBoard read the fields.
"""

from semisfl.metrics.declaration import AXES, LOSS, Axis, Metric, Panel, declared, metric, panels_of
from semisfl.metrics.method_metrics import MethodMetrics
from semisfl.metrics.round_metrics import ACCURACY_OF, KEYS, RoundMetrics

__all__ = [
    "ACCURACY_OF",
    "AXES",
    "KEYS",
    "LOSS",
    "Axis",
    "MethodMetrics",
    "Metric",
    "Panel",
    "RoundMetrics",
    "declared",
    "metric",
    "panels_of",
]
