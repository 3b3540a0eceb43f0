"""Runs over the network: the same results as in one process, the same bytes, and nothing private."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from network_helpers import SIDE, Network, Proxy, network, tiny, toy_data, until, weights
from PIL import Image
from torch import nn

from semisfl import certs, models, network as networks, run
from semisfl.config import ConfigError
from semisfl.fleet import protocol, transport
from semisfl.fleet.base import RoundAborted
from semisfl.fleet.link import Link, Rejected
from semisfl.fleet.protocol import Shapes, Terms
from semisfl.fleet.roster import Roster
from semisfl.fleet.transport import CHUNK, PREFIX, Assembler, Violation, cut
from semisfl.fleet.wire import decode

METHODS = ["semisfl", "semifl", "fedmatch", "fedswitch", "fedswitch-sl"]


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    certs.make_authority(folder)
    certs.make_server(folder, ["localhost", "127.0.0.1"])
    for number in range(4):
        certs.make_client(folder, f"client-{number}")
    return folder


def batchnorm_net(shape: models.Shape, classes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(shape[0], 4, 5), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(36, classes)
    )


def compare(config: run.Config, certificates: Path | None = None) -> tuple[Network, run.Experiment]:
    """The run in one process and over the network; losses, weights and traffic must agree."""
    data, partition = toy_data(config.clients.total)
    local = run.assemble(config, data, partition, device="cpu")
    expected = run.run_rounds(local)
    with network(config, certificates=certificates, works=networks.WORKS) as net:
        net.join_all()
        got = run.run_rounds(net.experiment)
        for ours, theirs in zip(got.rounds, expected.rounds, strict=True):
            for key, value in theirs.items():
                if key.startswith("loss"):
                    assert ours[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key
        assert net.fleet.traffic.counts == local.fleet.traffic.counts
        theirs, ours = weights(local), weights(net.experiment)
        assert theirs.keys() == ours.keys()
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-5, msg=key)
        assert {client.error for client in net.clients.values()} == {None}
    return net, local


@pytest.mark.parametrize("method", METHODS)
def test_same_losses_weights_and_bytes_as_in_one_process(method: str) -> None:
    compare(tiny(method=method))


@pytest.mark.parametrize("codec", ["fp16", "int8"])
@pytest.mark.parametrize("method", ["semisfl", "fedswitch"])
def test_codecs_lose_the_same_on_both(method: str, codec: str) -> None:
    wire = dict.fromkeys(("student_features", "teacher_features", "gradients", "models"), codec)
    compare(tiny(method=method, wire=wire))


@pytest.mark.parametrize("teacher", [{"client": "ema"}, {"client_batchnorm": "running"}])
def test_batchnorm_and_teacher_variants(teacher: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.MODELS, "batchnorm", batchnorm_net)
    compare(tiny(model={"name": "batchnorm"}, teacher=teacher))


def test_some_active_clients_over_mutual_tls(authority: Path) -> None:
    compare(tiny(clients=4, **{"clients": {"active": 2, "total": 4}}), authority)


def test_frames_larger_than_any_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        models.MODELS,
        "wide",
        lambda shape, classes: nn.Sequential(
            nn.Conv2d(1, 24, 5), nn.ReLU(), nn.Flatten(), nn.Linear(24 * 144, classes)
        ),
    )
    config = tiny(clients=2, model={"name": "wide", "projector": "linear"}, **{"clients": {"batch": 64, "total": 2, "active": 2}})
    net, _ = compare(config)
    per_step = 2 * 64 * 24 * 144 * 4
    assert per_step > 3 * CHUNK
    assert net.fleet.traffic.by_kind()["features_up"] == per_step * 2 * 2 * 2


def test_overhead_on_the_socket_is_below_one_percent(authority: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that really passed through TCP, TLS included, against the payload that is counted."""
    monkeypatch.setitem(
        models.MODELS,
        "wide",
        lambda shape, classes: nn.Sequential(
            nn.Conv2d(1, 28, 5), nn.ReLU(), nn.Flatten(), nn.Linear(28 * 144, classes)
        ),
    )
    config = tiny(
        clients=1,
        rounds=1,
        model={"name": "wide", "projector": "linear"},
        clients_={},
        **{},
    ) if False else tiny(clients=1, rounds=1, model={"name": "wide", "projector": "linear"})
    config = config.model_copy(update={"clients": config.clients.model_copy(update={"batch": 64, "steps": 6})})
    with network(config, certificates=authority) as net:
        proxy = Proxy(f"127.0.0.1:{net.port}")
        net.join(0, f"localhost:{proxy.port}")
        assert net.fleet.wait_for(1, 10)
        before = proxy.up + proxy.down
        run.run_rounds(net.experiment)
        until(lambda: net.fleet.traffic.total() > 0)
        passed, counted = proxy.up + proxy.down - before, net.fleet.traffic.total()
        proxy.close()
    assert counted > 15e6
    assert counted <= passed < 1.01 * counted
