"""Export a run's metrics to Prometheus: a sink that keeps the latest round, and an app that answers scrapes.

docs/watching.md has alert rules and a dashboard that use these metrics.
"""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from semisfl.metrics import ACCURACY_OF, LOSS, Metric as Declared, RoundMetrics
from semisfl.runs.declared import metrics_of, undeclared
from semisfl.watch.app import probes

if TYPE_CHECKING:
    from semisfl.net.server.fleet import NetworkFleet
    from semisfl.runs.sinks import RunInfo

CONTENT = "text/plain; version=0.0.4; charset=utf-8"
"""The type of Prometheus' text format."""


class Exporter:
    """A sink of a served run whose `app` answers Prometheus."""

    def __init__(self, fleet: "NetworkFleet") -> None:
        """Export the metrics of the rounds that `write` gets, and the state of the devices of ``fleet``."""
        self._fleet = fleet
        self._metrics: RoundMetrics | None = None
        self._declared: dict[str, Declared] = {}
        self._accuracy: dict[str, float] = {}
        self._ended_at = time.time()
        """When the last round ended; before the first one, when the server began."""
        self._planned = self._done = 0
        self._seconds = 0.0
        self._registry = CollectorRegistry()
        self._registry.register(self)

    # --- a sink ----------------------------------------------------------------------------------

    def start(self, run: "RunInfo") -> None:
        """Take in what the run plans, and how many rounds are done already."""
        self._planned, self._done = run.config.rounds, run.first
        self._declared = metrics_of([run.config.method])

    def write(self, metrics: RoundMetrics) -> None:
        """Take in a round that is done."""
        self._metrics, self._done, self._ended_at = metrics, metrics.round + 1, time.time()
        self._seconds += metrics.seconds or 0.0
        self._accuracy.update(metrics.accuracies)

    def close(self) -> None:
        """Do nothing: the last values stay until the server ends."""

    # --- answers to Prometheus -------------------------------------------------------------------

    @property
    def app(self) -> Starlette:
        """Return the app with /metrics and the probes."""

        def answer(request: Request) -> Response:
            return Response(generate_latest(self._registry), media_type=CONTENT)

        routes = [Route("/metrics", answer, methods=["GET"]), *probes()]
        return Starlette(routes=routes)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; the registry calls this once per scrape.

        Metrics of the fleet are there from the start, metrics of rounds after the first round. A loss or a
        number of a round has the value of the last round only, an accuracy that of the last test.
        """
        metrics, fleet, events = self._metrics, self._fleet, self._fleet.device_log.events
        # Not `fleet.present`: a device that is passed over for some rounds is connected too.
        present = len(fleet.sessions.enrolled)
        done = "rounds that are done, of all restarts"
        yield GaugeMetricFamily("semisfl_rounds_done", done, self._done)
        yield GaugeMetricFamily("semisfl_rounds_planned", "rounds that the run has", self._planned)
        yield GaugeMetricFamily(
            "semisfl_last_round_timestamp_seconds",
            "when one ended; before the first since the start, when that was",
            self._ended_at,
        )
        enrolled, waiting = len(fleet.roster.index), fleet.waiting.state is not None
        yield GaugeMetricFamily("semisfl_clients_present", "devices that are here", present)
        yield GaugeMetricFamily("semisfl_clients_enrolled", "devices that have a place", enrolled)
        quorum = fleet.config.network.quorum
        yield GaugeMetricFamily("semisfl_clients_needed", "network.quorum", quorum)
        yield GaugeMetricFamily("semisfl_waiting", "1 while no round can begin", waiting)
        for event, name, description in (
            ("refused", "semisfl_refusals", "devices not let in, or disconnected"),
            ("left_out", "semisfl_left_out", "times that a device was left out of a round"),
            ("here", "semisfl_arrivals", "times that a device came in"),
        ):
            yield CounterMetricFamily(
                name, description + ", since the start", value=events.get(event, 0)
            )
        yield CounterMetricFamily(
            "semisfl_round_seconds", "time of all rounds since the start", value=self._seconds
        )
        if metrics is None:
            return
        accuracy = GaugeMetricFamily(
            "semisfl_accuracy_ratio",
            "accuracy of the last test; of validation images with data.validation",
            labels=["model"],
        )
        for model, percent in self._accuracy.items():
            accuracy.add_metric([model], percent / 100)
        yield accuracy
        loss = GaugeMetricFamily("semisfl_loss", "mean of the last round", labels=["term"])
        for key, value in metrics.numbers().items():
            about = self._declared.get(key) or undeclared(key)
            if key.startswith(LOSS):
                loss.add_metric([key.removeprefix(LOSS)], value)
            elif about.prometheus is not None and not key.startswith(ACCURACY_OF):
                description = f"last round: {about.meaning}"
                yield GaugeMetricFamily(about.prometheus, description, value)
        yield loss
        sent = CounterMetricFamily(
            "semisfl_sent_bytes",
            "bytes that crossed since the run began",
            labels=["kind", "direction"],
        )
        for name, size in (metrics.bytes or {}).items():
            kind, _, direction = name.rpartition("_")
            sent.add_metric([kind, direction], size)
        yield sent
