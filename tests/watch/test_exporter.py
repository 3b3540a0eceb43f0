"""Test the metrics for Prometheus, and that the rules and the dashboard of the docs use existing ones."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from semisfl.metrics import RoundMetrics
from semisfl.runs.sinks import RunInfo
from semisfl.watch.address import Address, serve_app
from semisfl.watch.exporter import Exporter
from tests import toy
from tests.watch.test_app import ask

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "watching.md").read_text(encoding="utf-8")
EVENTS = {"here": 5, "refused": 2, "left_out": 1}


FLEET: Any = SimpleNamespace(
    sessions=SimpleNamespace(enrolled=range(3)),
    roster=SimpleNamespace(index=range(4)),
    config=SimpleNamespace(network=SimpleNamespace(quorum=5)),
    waiting=SimpleNamespace(state="waiting"),
    device_log=SimpleNamespace(events=EVENTS),
)
"""A server with three of four devices that waits for a fifth."""


def exporter(first: int = 0) -> Exporter:
    made = Exporter(FLEET)
    made.start(RunInfo(toy.values("semisfl", "rounds=9"), first, None))
    return made


def rules() -> list[dict[str, Any]]:
    text = yaml.safe_load((ROOT / "deploy" / "prometheus-rules.yml").read_text(encoding="utf-8"))
    listed: list[dict[str, Any]] = text["groups"][0]["rules"]
    return listed


def samples(made: Exporter) -> dict[str, dict[tuple[str, ...], float]]:
    with serve_app(made.app, Address("127.0.0.1", 0)) as url:
        status, text, headers = ask(url, "/metrics")
        assert status == 200 and headers["content-type"].startswith("text/plain")
        assert ask(url, "/metrics", "POST")[0] == 405
    return {
        sample.name: {
            tuple(sorted(other.labels.values())): other.value
            for other in family.samples
            if other.name == sample.name
        }
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


FULL = RoundMetrics(
    round=0,
    accuracy=80.0,
    accuracies={"teacher": 80.0, "student": 75.0},
    loss_supervised=1.5,
    loss_semi=2.5,
    mask_rate=0.25,
    contributing=3,
    bytes={"model_down": 100, "features_up": 900},
    bytes_total=1000,
    seconds=2.0,
)


def test_before_the_first_round_only_the_fleet_is_known() -> None:
    values = samples(exporter())
    assert values["semisfl_clients_present"] == {(): 3}
    assert values["semisfl_clients_needed"] == {(): 5} and values["semisfl_waiting"] == {(): 1}
    assert values["semisfl_refusals_total"] == {(): 2}
    assert values["semisfl_rounds_done"] == {(): 0} and values["semisfl_rounds_planned"] == {(): 9}
    assert "semisfl_accuracy_ratio" not in values


def test_a_resumed_run_to_which_nobody_returns_is_found_stalled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("semisfl.watch.exporter.time", SimpleNamespace(time=lambda: 1000.0))
    made = exporter(first=5)
    values = samples(made)
    assert values["semisfl_last_round_timestamp_seconds"] == {(): 1000.0}, "the start"
    (rule,) = [rule for rule in rules() if rule["alert"] == "SemisflStalled"]
    assert set(re.findall(r"\bsemisfl_\w+", rule["expr"])) <= values.keys()
    monkeypatch.setattr("semisfl.watch.exporter.time", SimpleNamespace(time=lambda: 2000.0))
    made.write(RoundMetrics(round=5))
    assert samples(made)["semisfl_last_round_timestamp_seconds"] == {(): 2000.0}


def test_after_a_round_the_exporter_has_its_numbers() -> None:
    made = exporter()
    made.write(FULL)
    made.write(RoundMetrics(round=1, loss_supervised=1.0, bytes={"model_down": 200}, seconds=3.0))
    values = samples(made)
    assert values["semisfl_rounds_done"] == {(): 2}
    assert values["semisfl_accuracy_ratio"] == {("teacher",): 0.8, ("student",): 0.75}
    assert values["semisfl_loss"] == {("supervised",): 1.0}, "the last round had no other"
    assert values["semisfl_sent_bytes_total"] == {("down", "model"): 200}
    assert values["semisfl_round_seconds_total"] == {(): 5.0}
    assert values["semisfl_last_round_seconds"] == {(): 3.0}
    assert values["semisfl_left_out_total"] == {(): 1}


def test_the_rules_and_the_dashboard_of_the_documentation_name_what_is_told() -> None:
    made = exporter()
    made.write(FULL)
    known = samples(made).keys()
    expressions = [rule["expr"] for rule in rules()]
    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_text(encoding="utf-8"))
    expressions += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(expressions) >= 9
    metrics = {name for one in expressions for name in re.findall(r"\bsemisfl_\w+", one)}
    assert metrics <= known, metrics - known
    assert {"semisfl_rounds_done", "semisfl_accuracy_ratio", "semisfl_clients_present"} <= metrics
    assert {
        "semisfl_sent_bytes_total",
        "semisfl_refusals_total",
        "semisfl_last_round_seconds",
    } <= metrics
