"""Runs over the network: the same results as in one process, the same bytes, and nothing private."""

import contextlib
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from semisfl.fleet.setup import NetworkOptions
from semisfl.models.build import build
from semisfl.net import hostport, messages
from semisfl.net.chunks import CHUNK
from semisfl.net.client.connection import Connection, Target
from semisfl.net.client.join import load_images
from semisfl.net.frames import Frame, Schema, WireError, decode
from semisfl.net.messages import Schemas
from semisfl.net.server.roster import Roster
from semisfl.runs.experiment import Experiment, assemble
from semisfl.runs.loop import run_rounds
from semisfl.settings import lookup
from semisfl.settings.config import Config, ConfigError
from tests.net.harness import (
    BATCHNORM,
    CLASSES,
    SIDE,
    Network,
    Proxy,
    certificates,
    network,
    tiny,
    toy_data,
    weights,
)

METHODS = ["semisfl", "semifl", "fedmatch", "fedswitch", "fedswitch-sl", "fl2"]


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificates(tmp_path_factory.mktemp("certs"), 4)


RESIDUAL = [
    *BATCHNORM[:3],
    {
        "kind": "residual",
        "body": [
            {"kind": "conv", "channels": 6, "stride": 2, "padding": 1, "bias": False},
            {"kind": "batchnorm"},
        ],
        "shortcut": [{"kind": "conv", "channels": 6, "kernel": 1, "stride": 2}],
    },
    *({"kind": kind} for kind in ("relu", "avgpool", "flatten", "linear")),
]
WIDE = [{"kind": "conv", "channels": 150, "kernel": 5}, {"kind": "relu"}, {"kind": "flatten"}]


def compare(config: Config, certificates: Path | None = None) -> tuple[Network, Experiment]:
    """The run in one process and over the network; losses, weights and traffic must agree."""
    data, partition = toy_data(config.clients.total)
    local = assemble(config, data, partition, device="cpu")
    expected = run_rounds(local)
    with network(config, certificates=certificates) as net:
        net.join_all()
        got = run_rounds(net.experiment)
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


# Of whole models one codec is enough: what each codec loses does not depend on the method.
@pytest.mark.parametrize(
    ("method", "codec"),
    [*(("semisfl", codec) for codec in ("fp16", "int8", "int4")), ("fedswitch", "int8")],
)
def test_codecs_lose_the_same_on_both(method: str, codec: str) -> None:
    wire = dict.fromkeys(("student_features", "teacher_features", "gradients", "models"), codec)
    compare(tiny(method=method, wire=wire))


@pytest.mark.parametrize("threshold", [math.inf, -math.inf])
def test_an_infinite_threshold_is_the_same_on_both(threshold: float) -> None:
    compare(tiny(method="fedswitch", fedswitch={"iid_threshold": threshold}))


@pytest.mark.parametrize("teacher", ["frozen", "ema"])
def test_batchnorm_and_teacher_variants(teacher: str) -> None:
    compare(tiny(model={"layers": BATCHNORM}, semisfl={"client_teacher": teacher}))


def test_labels_that_adapt_to_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semisfl.algorithm.labelling.WARMUP_ROUNDS", 0)
    compare(tiny(semisfl={"align": "client"}, server={"labeled_view": "both"}))


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("semifl", "fl2")])
def test_a_table_of_ones_own_crosses_the_network(method: str) -> None:
    """Not with SemiFL and (FL)², which over a network send again what clients of a simulation still hold."""
    _, local = compare(tiny(method=method, model={"layers": RESIDUAL}))
    names = {key.split("/")[-1] for key in weights(local)}
    assert any(name.endswith("residual1.body.conv1.weight") for name in names), names


def test_some_active_clients_over_mutual_tls(authority: Path) -> None:
    compare(tiny(4, clients={"active": 2}), authority)


@pytest.fixture
def wide() -> dict[str, dict]:
    """Settings of a model whose features are as large as in a real run."""
    layers = [*WIDE, {"kind": "linear"}]
    return {"model": {"layers": layers}, "clients": {"batch": 12, "steps": 4}}


def test_frames_larger_than_any_message(wide: dict[str, dict]) -> None:
    net, _ = compare(tiny(2, rounds=1, **wide))
    frame = 2 * 12 * 150 * 144 * 4
    assert frame > 3 * CHUNK
    assert net.fleet.traffic.by_kind()["features_up"] == 2 * 4 * frame


def test_overhead_on_the_socket_is_below_one_percent(
    authority: Path, wide: dict[str, dict]
) -> None:
    """Bytes that really passed through TCP, TLS included, against the payload that is counted."""
    with network(tiny(1, rounds=1, **wide), certificates=authority) as net:
        proxy = Proxy(f"127.0.0.1:{net.port}")
        net.enrol(0, f"localhost:{proxy.port}")
        before = proxy.up + proxy.down
        run_rounds(net.experiment)
        passed, counted = proxy.up + proxy.down - before, net.fleet.traffic.total()
        streamed = sum(net.stream_bytes())
        proxy.close()
    assert counted > 10e6
    assert counted < streamed < 1.005 * counted
    assert streamed < passed < 1.01 * counted


# --- what a client gives away ---------------------------------------------------------------------


def image_folder(root: Path, count: int, side: int = SIDE) -> list[Path]:
    root.mkdir(parents=True)
    rng = np.random.default_rng(3)
    paths = [root / f"holiday-at-the-lake-{number}.png" for number in range(count)]
    for path in paths:
        Image.fromarray(rng.integers(0, 256, (side, side), dtype=np.uint8)).save(path)
    return paths


def decode_one(data: bytes, *expected: dict[str, Schema]) -> Frame:
    """The frame, by the first of these that allows it."""
    for schemas in expected[:-1]:
        with contextlib.suppress(WireError):
            return decode(data, schemas)
    return decode(data, expected[-1])


def test_a_client_sends_features_weights_and_counts_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything written to the stream is recorded, taken apart and accounted for."""
    paths = image_folder(tmp_path / "secret-folder", 12)
    sent: list[bytes] = []
    original = Connection._send

    async def recording(self: Connection, call: object, ticket: int, frame: bytes) -> None:
        sent.append(frame)
        await original(self, call, ticket, frame)  # type: ignore[arg-type]

    monkeypatch.setattr(Connection, "_send", recording)
    for method in METHODS:
        config = tiny(1, method=method, rounds=1)
        images, _ = load_images(tmp_path / "secret-folder", (1, SIDE, SIDE))
        with network(config) as net:
            net.data.images[net.partition.clients[0]] = images
            net.join_all()
            run_rounds(net.experiment)
        shapes = Schemas.of(config, build("cnn", (1, SIDE, SIDE), CLASSES))
        everything = b"".join(sent)
        allowed = {
            "hello": messages.HELLO,
            "ready": messages.READY,
            "features": shapes.features_frame,
            "bottom": shapes.bottom_frame,
            "fetch": messages.FETCH,
            "declined": messages.DECLINED,
        }
        results = [
            {"states": shapes.result(work.answers.outline(shapes.full))}
            for work in lookup.works(lookup.method(method)).values()
        ]
        kinds = []
        for data in filter(None, sent):
            frame = decode_one(data, allowed, *results)
            kinds.append(frame.kind)
            for value in frame.fields.get("numbers", {}).values():
                assert type(value) in (int, float)
        assert {"hello", "ready"} < set(kinds) and {"bottom", "states", "declined"} & set(kinds)
        for image in images.numpy():
            # Sixteen neighbouring pixels, as they are and as the model sees them.
            row = image[0, SIDE // 2]
            normalised = ((row.astype(np.float64) / 255 - 0.5) / 0.5).astype(np.float32)
            for form in (
                row.tobytes(),
                normalised.tobytes(),
                (row / 255).astype(np.float32).tobytes(),
            ):
                assert form not in everything
        for word in ("secret-folder", "holiday", *(path.name for path in paths)):
            assert word.encode() not in everything
        sent.clear()


# --- who is who -----------------------------------------------------------------------------------


def test_roster_survives_a_restart_and_never_changes_an_index(tmp_path: Path) -> None:
    first = Roster(2)
    first.keep_in(tmp_path / "roster.json")
    assert [first.enrol(name, 5) for name in ("b", "a", "b", "c")] == [0, 1, 0, None]
    assert first.enrol("b", 7) == 0
    second = Roster(2)
    second.keep_in(tmp_path / "roster.json")
    assert second.enrol("a", 5) == 1 and second.index == {"b": 0, "a": 1}
    assert second.images == {0: 7, 1: 5}
    fresh = Roster(2)
    fresh.load_state_dict(first.state_dict())
    assert fresh.enrol("b", 7) == 0
    fresh = Roster(2)
    fresh.load_state_dict({"index": {"a": 0}, "images": {"0": 5}})  # an older checkpoint
    fresh.keep_in(tmp_path / "roster.json")
    assert fresh.index == first.index and fresh.images == first.images, "the file is newer"
    with pytest.raises(ValueError, match=r"the places \[0, 0\] does not fit"):
        Roster(2).load_state_dict({"index": {"a": 0, "b": 0}, "images": {}})
    with pytest.raises(ValueError, match=r"does not fit clients\.total = 1"):
        Roster(1).load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    "content",
    [
        *("", "[1]", "[" * 10**5, '{"index": {"b"', '{"b": "first"}', '{"index": {"b": 0}}'),
        *(f'{{"index": {{"b": 0}}, "images": {{"0": {odd}}}}}' for odd in ("null", "1e999")),
    ],
)
def test_a_damaged_roster_is_the_checkpoints(content: str, tmp_path: Path) -> None:
    file = tmp_path / "roster.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"roster\.json, which says who is which client, is damaged"
    ):
        Roster(2).keep_in(file)
    restored = Roster(2)
    restored.load_state_dict({"index": {"b": 0, "a": 1}, "images": {"0": 7, "1": 5}})
    restored.keep_in(file)
    again = Roster(2)
    again.keep_in(file)
    assert again.state_dict() == restored.state_dict()


def test_plaintext_needs_loopback_and_to_be_asked_for() -> None:
    for address in ("0.0.0.0:0", "192.0.2.1:99", "example.org:99", "[2001:db8::1]:99"):
        with pytest.raises(ConfigError, match="not a loopback address"):
            hostport.require_loopback(address)
    for address in ("127.0.0.1:1", "localhost:1", "[::1]:1", "127.9.9.9:1"):
        hostport.require_loopback(address)
    with pytest.raises(ConfigError, match="'localhost' is not HOST:PORT"):
        hostport.require_loopback("localhost")
    with pytest.raises(ValueError, match="needs a certificate"):
        Connection(Target("127.0.0.1:1", None))
    with pytest.raises(ConfigError, match="not a loopback address"):
        Connection(Target("192.0.2.1:99", None, insecure_loopback=True))
    with pytest.raises(ConfigError, match="needs certificates"):
        assemble(
            tiny(fleet={"kind": "network"}),
            toy_data()[0],
            device="cpu",
            network=NetworkOptions("127.0.0.1:0", None),
        )


def test_one_client_s_claim_of_images_has_a_limit() -> None:
    """Otherwise one device decides |D_l| / |D|, and the server hardly trains on its labels any more."""
    with network(tiny(4)) as net:
        roster = net.fleet.roster
        roster.images = {0: 10_000_000, 1: 100}
        assert net.fleet.image_counts() == roster.images, "of two, nobody knows which is usual"
        roster.images = {0: 10_000_000, 1: 100, 2: 80, 3: 120}
        assert net.fleet.image_counts() == {0: 1100, 1: 100, 2: 80, 3: 120}
