"""Split inference over real TLS answers as the whole model does, and tells a device without access so."""

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from semisfl import load
from semisfl.cli.main import main
from semisfl.net.client.connection import Target, open_channel
from semisfl.net.frames import encode
from semisfl.net.tls import certs
from semisfl.use import split_inference
from semisfl.use.classifier import Classifier
from semisfl.use.export import export
from semisfl.use.model_server import ModelServer
from semisfl.use.split_inference import ModelClient
from tests import toy
from tests.processes import Forked
from tests.use.serving import connect, lie, overheard, served
from tests.use.trained import Trained

PIXELS = toy.dataset().test_images[:30]


@pytest.fixture(scope="module")
def server(model: Classifier, authority: Path) -> Iterator[ModelServer]:
    with served(model, authority) as one:
        yield one


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the empty folder in which this test keeps copies of bottoms."""
    monkeypatch.setenv("SEMISFL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def assert_answers(client: ModelClient, model: Classifier, close: float = 1e-6) -> None:
    expected = model.probabilities(PIXELS)
    torch.testing.assert_close(client.predict(PIXELS).probabilities, expected, rtol=0, atol=close)


# --- answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("codec", "close"), [("fp32", 1e-6), ("fp16", 1e-3), ("int8", 0.02)])
def test_split_inference_gives_the_answers_of_the_whole_model(
    codec: str, close: float, model: Classifier, server: ModelServer, authority: Path
) -> None:
    with connect(server, authority, codec=codec) as client:
        assert (client.model.classes, client.model.shape) == (model.classes, model.shape)
        assert_answers(client, model, close)
        assert not len(client.predict(PIXELS[:0]).probabilities)


@pytest.mark.parametrize("form", ["onnx", "safetensors"])
def test_the_bottom_may_be_a_file(
    form: Any, model: Classifier, authority: Path, tmp_path: Path, images: Path
) -> None:
    cut = model.recut("conv")
    bottom = export(cut, PIXELS, tmp_path, to=form, part="bottom").path
    top = load(export(cut, PIXELS, tmp_path, to="safetensors", part="top").path)
    with served(top, authority) as server:
        with connect(server, authority, bottom=bottom) as client:
            predictions = client.predict(images)
        with pytest.raises(ValueError, match="serves a top alone; give the bottom as a file"):
            connect(server, authority)
    expected = model.predict(images)
    assert predictions.names == expected.names
    torch.testing.assert_close(predictions.probabilities, expected.probabilities, rtol=0, atol=1e-5)


def test_the_bottom_is_downloaded_once_and_again_if_its_copy_is_damaged(
    model: Classifier, server: ModelServer, authority: Path, cache: Path
) -> None:
    with connect(server, authority):
        pass
    (copy,) = cache.iterdir()
    assert copy.stat().st_mode & 0o777 == 0o600
    written, content = copy.stat().st_mtime_ns, copy.read_bytes()
    with connect(server, authority) as client:
        assert copy.stat().st_mtime_ns == written
        assert_answers(client, model)
    copy.write_bytes(content[:-5])
    with connect(server, authority) as client:
        assert copy.read_bytes() == content
        assert_answers(client, model)


def test_other_weights_than_the_owner_accepted_are_not_used(
    model: Classifier, authority: Path, cache: Path
) -> None:
    bottom = model.network.bottom
    honest = {k: v.clone() for k, v in bottom.state_dict().items()}
    with served(model, authority) as liar:
        try:
            bottom.load_state_dict({k: v * 0 for k, v in honest.items()})
            with pytest.raises(ValueError, match="sends another bottom than it describes"):
                connect(liar, authority)
        finally:
            bottom.load_state_dict(honest)
    assert not cache.exists()


def test_more_images_than_a_call_takes(
    model: Classifier, server: ModelServer, authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = overheard(server, monkeypatch)
    monkeypatch.setattr(split_inference, "MOST_ROWS", 7)
    with connect(server, authority) as client:
        predictions = client.predict(PIXELS)
    assert list(map(len, rows)) == [7, 7, 7, 7, 2]
    expected = model.probabilities(PIXELS)
    torch.testing.assert_close(predictions.probabilities, expected, rtol=0, atol=1e-6)
    assert split_inference.rows_per_call(10**7, "fp32") == 1


def test_a_device_that_stalls_in_a_call_keeps_no_other_from_its_answer(
    model: Classifier, server: ModelServer, authority: Path
) -> None:
    """A link may need minutes for a request."""
    stalled, credentials = threading.Event(), certs.load_client_credentials(authority, "camera")

    def never() -> Iterator[bytes]:
        stalled.wait()
        yield b""

    with open_channel(f"localhost:{server.port}", credentials, ()) as channel:
        ask = channel.stream_unary(f"/{split_inference.SERVICE}/Features")
        calls = [ask.future(never()) for _ in range(8)]
        with connect(server, authority) as client:
            assert_answers(client, model)
        assert not any(call.done() for call in calls)
        stalled.set()


# --- who may not, and what may not be asked -------------------------------------------------------


def test_halves_of_two_models_are_told_apart(
    trained: Trained, model: Classifier, server: ModelServer, authority: Path, tmp_path: Path
) -> None:
    other = load(trained("supervised")[0])
    for wrong in (other, model.recut("conv")):
        made = export(wrong, PIXELS, tmp_path, to="safetensors", part="bottom").path
        with pytest.raises(ValueError, match="is not the bottom of the model that"):
            connect(server, authority, bottom=made)
    with connect(server, authority) as client:
        client.model = client.model.model_copy(update={"identity": other.identity})
        with pytest.raises(ValueError, match="is not the other half of this server's model"):
            client.predict(PIXELS)


def test_unknown_and_revoked_devices_are_refused(
    server: ModelServer, authority: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(server, authority, "stolen") as client:
        certs.revoke(authority, "stolen")
        with pytest.raises(ValueError, match="the certificate of stolen is revoked"):
            client.predict(PIXELS)
    assert "identity=stolen" in caplog.text
    certs.make_authority(tmp_path / "other")
    certs.make_client(tmp_path / "other", "camera")
    with pytest.raises((ValueError, OSError)):
        connect(server, tmp_path / "other")
    with pytest.raises(ValueError, match="is not a loopback address, so plaintext is refused"):
        ModelClient(Target("192.0.2.1:1", None, insecure_loopback=True))


def test_invalid_requests_are_refused_and_the_server_continues(
    model: Classifier, server: ModelServer, authority: Path
) -> None:
    features, named = model.features(PIXELS), {"identity": server.served.identity}
    honest = b"".join(encode("features", named, {"features": features}))
    not_finite = b"".join(encode("features", named, {"features": features * float("nan")}))
    credentials = certs.load_client_credentials(authority, "camera")
    with open_channel(f"localhost:{server.port}", credentials, ()) as channel:
        stub = channel.unary_unary(f"/{split_inference.SERVICE}/Features")

        def code(data: bytes, rows: str = "30", codec: str = "fp32") -> grpc.StatusCode | None:
            metadata = ((split_inference.ROWS, rows), (split_inference.CODEC, codec))
            error = stub.future(data, metadata=metadata, timeout=20).exception()
            return None if error is None else error.code()

        damaged = [(b"",), (b"nonsense" * 100,), (not_finite,), (honest[:-16],)]
        for one in (*damaged, *((honest, rows) for rows in ("29", "0", "257", "-1", "many"))):
            assert code(*one) is grpc.StatusCode.INVALID_ARGUMENT, one[1:]
        for codec in ("fp99", "fp16"):
            assert code(honest, "30", codec) is grpc.StatusCode.INVALID_ARGUMENT, codec
        large = bytes(split_inference.LARGEST_REQUEST + 1)
        assert code(large) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert code(honest) is None


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [3, 16384, 16384]},
        {"shape": [3, True, 8]},
        {"classes": []},
        {"classes": [[[]]]},
        {"std": [0.0, 0.0, 0.0]},
        {"mean": [0.5]},
        {"features": 10**12},
        {"features": 1},
        {"bottom": "../../x"},
        {"layers": [{"kind": "conv", "channels": 10**9}]},
        {"layers": "cnn"},
    ],
    ids=str,
)
def test_terms_out_of_range_are_refused(
    change: dict[str, Any], model: Classifier, server: ModelServer, authority: Path
) -> None:
    with served(model, authority) as liar:
        lie(liar, lambda plain: plain.update(change))
        with pytest.raises(ValueError, match="does not describe a model") as error:
            connect(liar, authority)
    assert "\n" not in str(error.value)


# --- the commands --------------------------------------------------------------------------------


def test_a_device_that_joins_is_told_that_nothing_is_trained_there(
    server: ModelServer, images: Path, authority: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"localhost:{server.port}"
    camera = ["--certs", str(authority / "clients" / "camera")]
    assert main(["join", address, "--data", str(images), *camera]) == 4
    assert "semisfl classify" in capsys.readouterr().err


def test_a_revoked_certificate_has_the_exit_code_of_join(
    server: ModelServer, images: Path, authority: Path
) -> None:
    certs.make_client(authority, "taken")
    certs.revoke(authority, "taken")
    address, camera = f"localhost:{server.port}", str(authority / "clients" / "taken")
    for words in (["classify", address, str(images)], ["inspect", address]):
        assert main([*words, "--certs", camera]) == 5


def test_both_commands(
    trained: Trained, images: Path, authority: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(trained("fedswitch")[0])
    words = [sys.executable, "-m", "semisfl", "serve", "--model", run, "--certs", str(authority)]
    server = Forked(
        [*words, "--listen", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr is not None
        digest = server.stderr.readline().split()[-1]
        port = re.match(r"listening on port (\d+)", server.stderr.readline())
        assert port
        words = ["classify", f"localhost:{port[1]}", str(images), "--json", "--codec", "fp16"]
        words += ["--certs", str(authority / "clients" / "camera"), "--accept", digest]
        assert main(words) == 0
        answer = json.loads(capsys.readouterr().out)
        server.send_signal(signal.SIGTERM)
        out, _ = server.communicate(timeout=60)
        assert server.returncode == 0 and "stopped after 24 images" in out
    finally:
        server.kill()
        server.wait()
    expected = load(run).predict(images)
    assert [row["image"] for row in answer["images"]] == expected.names
    best = [row["classes"][0]["probability"] for row in answer["images"]]
    assert best == pytest.approx([top[0][1] for top in expected.top()], abs=2e-3)
