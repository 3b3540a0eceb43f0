"""Split inference over real TLS answers as the whole model does, and tells a device without access so."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from semisfl import load
from semisfl.cli.main import main
from semisfl.net import chunks
from semisfl.net.client.identity import Target
from semisfl.net.frames import Frame, Schema, decode, encode
from semisfl.net.tls import certs
from semisfl.runs import checkpoint
from semisfl.use import split_inference
from semisfl.use.classifier import Classifier
from semisfl.use.export import export
from semisfl.use.model_client import ModelClient
from semisfl.use.model_connection import ModelConnection
from tests import toy
from tests.processes import Forked
from tests.use.serving import connect, served
from tests.use.trained import Trained

PIXELS = toy.dataset().test_images[:30]


@pytest.fixture(scope="module")
def address(model: Classifier, authority: Path) -> Iterator[str]:
    with served(model, authority) as server:
        yield f"localhost:{server.port}"


# --- answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("codec", "close"), [("fp32", 1e-6), ("fp16", 1e-3), ("int8", 0.02)])
def test_split_inference_gives_the_answers_of_the_whole_model(
    codec: str, close: float, model: Classifier, address: str, authority: Path
) -> None:
    expected = model.predict(PIXELS)
    with connect(address, authority, codec=codec) as client:
        before = client.connection.sent
        predictions = client.predict(PIXELS)
        assert (client.classes, client.shape) == (model.classes, model.shape)
        width = {"fp32": 4, "fp16": 2, "int8": 1}[codec]
        payload = 30 * (model.network.features * width + (4 if codec == "int8" else 0))
        assert payload <= client.connection.sent - before <= payload + 500
    torch.testing.assert_close(
        predictions.probabilities, expected.probabilities, rtol=0, atol=close
    )
    if codec == "fp32":
        assert predictions.labels == expected.labels


@pytest.mark.parametrize("form", ["onnx", "safetensors"])
def test_the_bottom_may_be_a_file(
    form: Any, model: Classifier, authority: Path, tmp_path: Path, images: Path
) -> None:
    cut = model.recut("conv")
    bottom = export(cut, PIXELS, tmp_path, to=form, part="bottom").path
    top = load(export(cut, PIXELS, tmp_path, to="safetensors", part="top").path)
    with served(top, authority) as server:
        address = f"localhost:{server.port}"
        with connect(address, authority, bottom=bottom) as client:
            predictions = client.predict(images)
        with pytest.raises(ValueError, match=r"serves the top alone, .* give its bottom as a file"):
            connect(address, authority)
    expected = model.predict(images)
    assert predictions.names == expected.names
    torch.testing.assert_close(predictions.probabilities, expected.probabilities, rtol=0, atol=1e-5)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the empty folder in which this test keeps copies of bottoms."""
    monkeypatch.setenv("SEMISFL_CACHE", str(tmp_path))
    return tmp_path


def test_the_bottom_is_fetched_once(
    model: Classifier, address: str, authority: Path, cache: Path
) -> None:
    weights = sum(tensor.nbytes for tensor in model.network.bottom.state_dict().values())
    received = []
    for _ in range(2):
        with connect(address, authority) as client:
            received.append(client.connection.received)
    assert weights < received[0] - received[1] < weights + 2000
    (cached,) = cache.iterdir()
    assert cached.stat().st_mode & 0o777 == 0o600
    cached.write_bytes(cached.read_bytes()[:-5])
    with connect(address, authority) as client:
        assert client.connection.received == received[0], "a damaged copy is fetched anew"
        probabilities = client.probabilities(PIXELS)
    torch.testing.assert_close(probabilities, model.probabilities(PIXELS), rtol=0, atol=1e-6)


def test_a_large_bottom_crosses_in_parts(
    model: Classifier, authority: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that takes none of an answer makes the server hold a part, not the whole bottom."""
    monkeypatch.setattr(split_inference, "PART", 100)
    asked = []
    ask = ModelConnection.ask

    def counted(*arguments: Any) -> Frame:
        before = arguments[0].received
        frame = ask(*arguments)
        asked.append((arguments[1], arguments[0].received - before))
        return frame

    monkeypatch.setattr(ModelConnection, "ask", counted)
    with (
        served(model, authority) as server,
        connect(f"localhost:{server.port}", authority) as client,
    ):
        probabilities = client.probabilities(PIXELS)
    torch.testing.assert_close(probabilities, model.probabilities(PIXELS), rtol=0, atol=1e-6)
    sizes = [size for call, size in asked if call == "Fetch"]
    frame = encode("bottom", {}, model.network.bottom.state_dict())
    assert len(sizes) == -(-sum(map(len, frame)) // 100) > 2
    assert max(sizes) < 300


def test_tensors_of_all_types_and_sizes_are_joined_and_parted_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(split_inference, "PART", 9)
    state = {
        "b": torch.randn(3, 5),
        "a": torch.tensor(7),
        "c": torch.empty(0, 2),
        "d": torch.tensor([True, False, True]),
        "e": torch.randn(2).to(torch.bfloat16),
        "f": torch.randn(6)[::2],
    }
    for tensors in (state, {}):
        frame = b"".join(encode("bottom", {}, tensors))
        whole = split_inference.bottom_schema(tensors)
        parts = split_inference.parts_schemas(whole.size("bottom"))
        sizes = [spec.shape[0] for part in parts for spec in part.specs.values()]
        assert sum(sizes) == len(frame) and max(sizes) == 9
        again = decode(frame, {"bottom": whole}).tensors
        assert again.keys() == tensors.keys()
        assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("part", [-1, 1, 2**40])
def test_a_part_that_there_is_not_is_refused(part: int, address: str, authority: Path) -> None:
    credentials = certs.load_client_credentials(authority, "camera")
    connection = ModelConnection(address, credentials)
    request = b"".join(encode("fetch", {"part": part}, {}))
    with contextlib.closing(connection), pytest.raises(ValueError, match=f"part {part} of the"):
        connection.ask("Fetch", request, "part", Schema())


def test_a_lying_server_does_not_poison_the_copy_of_an_honest_one(
    model: Classifier, address: str, authority: Path, cache: Path
) -> None:
    honest = {k: v.clone() for k, v in model.network.bottom.state_dict().items()}
    digest = checkpoint.digest(honest)
    about = split_inference.describe(
        model.description, model.identity, model.network.features, digest
    )
    try:
        model.network.bottom.load_state_dict({k: v * 0 for k, v in honest.items()})
        with served(model, authority) as liar:
            liar._about = about
            with pytest.raises(ValueError, match=r"another bottom .*; if its model was not"):
                connect(f"localhost:{liar.port}", authority)
    finally:
        model.network.bottom.load_state_dict(honest)
    assert not list(cache.iterdir())
    # Somebody else of this machine puts weights under the honest one's name.
    checkpoint.write(
        cache / f"bottom-{digest}.safetensors",
        {"bottom": {k: v * 0 for k, v in honest.items()}},
    )
    with connect(address, authority) as client:
        answers = client.probabilities(PIXELS)
    torch.testing.assert_close(answers, model.probabilities(PIXELS), rtol=0, atol=1e-6)


def test_a_server_cannot_give_a_kept_bottom_other_layers(
    model: Classifier, address: str, authority: Path, cache: Path
) -> None:
    with connect(address, authority):
        assert len(list(cache.iterdir())) == 1
    with served(model, authority) as liar:
        about = json.loads(liar._about)
        about["layers"].insert(0, {"kind": "batchnorm", "name": "more"})
        about["cut"] = None if about["cut"] is None else about["cut"] + 1
        liar._about = json.dumps(about)
        with pytest.raises(ValueError, match=r"tensor .* where .* is expected"):
            connect(f"localhost:{liar.port}", authority)


@pytest.mark.parametrize("wrong", [float("nan"), -0.5, 7.0])
def test_answers_that_are_no_probabilities_are_refused(
    wrong: float, model: Classifier, authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        model, "answer", lambda rows: torch.full((len(rows), len(model.classes)), wrong)
    )
    with (
        served(model, authority) as server,
        connect(f"localhost:{server.port}", authority) as client,
        pytest.raises(ValueError, match="answers with numbers that are no probabilities"),
    ):
        client.probabilities(PIXELS)


def test_images_go_only_to_a_server_that_takes_them(
    model: Classifier, address: str, authority: Path
) -> None:
    with pytest.raises(ValueError, match="takes features, no images"):
        connect(address, authority, send_images=True)
    with connect(address, authority) as client:
        client._bottom = None
        with pytest.raises(ValueError, match="this server takes features, no images"):
            client.probabilities(PIXELS)
    with (
        served(model, authority, accept_images=True) as server,
        connect(f"localhost:{server.port}", authority, send_images=True) as client,
    ):
        probabilities = client.probabilities(PIXELS)
    torch.testing.assert_close(probabilities, model.probabilities(PIXELS), rtol=0, atol=1e-6)


def test_more_images_than_a_call_takes(
    model: Classifier, address: str, authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_inference, "rows_at_a_time", lambda *_: 7)
    with connect(address, authority) as client:
        predictions = client.predict(PIXELS)
    torch.testing.assert_close(
        predictions.probabilities, model.probabilities(PIXELS), rtol=0, atol=1e-6
    )
    monkeypatch.undo()
    assert split_inference.rows_at_a_time(100, "fp32") == split_inference.MOST_ROWS
    assert split_inference.rows_at_a_time(10**7, "fp32") == 1


def test_links_out_of_a_folder_are_not_followed(
    address: str,
    authority: Path,
    images: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Images outside the folder are not sent; a link named on the command line may be."""
    first, second = sorted(images.rglob("*.png"))[:2]
    folder = tmp_path / "camera"
    folder.mkdir()
    (folder / "own.png").write_bytes(first.read_bytes())
    (folder / "again.png").symlink_to(folder / "own.png")
    (folder / "elsewhere.png").symlink_to(second)
    (folder / "loop.png").symlink_to(folder / "loop.png")
    with connect(address, authority) as client:
        predictions = client.predict(folder)
        assert [Path(name).name for name in predictions.names] == ["again.png", "own.png"]
        assert [Path(name).name for name, _ in predictions.skipped] == ["loop.png"]
        assert f"not followed, as they lead out of {folder}: 1 link" in caplog.text
        assert len(client.predict(folder / "elsewhere.png").names) == 1


def test_a_request_crosses_in_many_messages(
    model: Classifier, address: str, authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 100)
    with connect(address, authority) as client:
        probabilities = client.probabilities(PIXELS)
    torch.testing.assert_close(probabilities, model.probabilities(PIXELS), rtol=0, atol=1e-6)


# --- who may not, and what may not be asked -------------------------------------------------------


def test_halves_of_two_models_are_told_apart(
    trained: Trained, model: Classifier, address: str, authority: Path, tmp_path: Path
) -> None:
    other = load(trained("supervised")[0])
    for wrong in (other, model.recut("conv")):
        made = export(wrong, PIXELS, tmp_path, to="safetensors", part="bottom").path
        with pytest.raises(ValueError, match="is not the bottom of the model that"):
            connect(address, authority, bottom=made)
    with connect(address, authority) as client:
        client.identity = other.identity
        with pytest.raises(ValueError, match="is not the other half of this server's model"):
            client.probabilities(PIXELS)


def test_unknown_and_revoked_devices_are_refused(
    address: str, authority: Path, tmp_path: Path
) -> None:
    with connect(address, authority, "stolen") as client:
        certs.revoke(authority, "stolen")
        with pytest.raises(ValueError, match="the certificate of stolen is revoked"):
            client.probabilities(PIXELS)
    certs.make_authority(tmp_path / "other")
    certs.make_client(tmp_path / "other", "camera")
    with pytest.raises(ValueError, match="this device trusts"):
        connect(address, tmp_path / "other")
    long_ago = datetime.now(UTC) - timedelta(days=9)
    certs.make_client(
        authority, "old", valid_from=long_ago, valid_until=long_ago + timedelta(days=1)
    )
    with pytest.raises(
        ValueError, match=r"client.crt expired on .* `semisfl certs renew --name old`"
    ):
        connect(address, authority, "old")
    with pytest.raises(ValueError, match="is not a loopback address, so plaintext is refused"):
        ModelClient(Target("192.0.2.1:1", None, insecure_loopback=True))
    with pytest.raises(ValueError, match="a client needs a certificate"):
        ModelClient(Target("localhost:1", None))


def test_a_missing_server_is_one_line(authority: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        with pytest.raises(OSError, match=r"no answer from localhost:\d+: ") as error:
            connect(f"localhost:{taken.getsockname()[1]}", authority)
    assert "\n" not in str(error.value)


def test_invalid_requests_are_refused_and_the_server_continues(
    model: Classifier, address: str, authority: Path
) -> None:
    features = model.features(PIXELS)
    with connect(address, authority) as client:
        named = {"identity": client.identity}
        honest = b"".join(encode("features", named, {"features": features}))
        not_finite = b"".join(encode("features", named, {"features": features * float("nan")}))

        def call(data: bytes, rows: str = "30", codec: str = "fp32") -> None:
            stub = client.connection.channel().unary_unary(split_inference.method("Features"))
            stub(
                data,
                metadata=((split_inference.ROWS, rows), (split_inference.CODEC, codec)),
                timeout=20,
            )

        for arguments, reason in (
            ((b"",), "shorter than its prefix"),
            ((b"nonsense" * 100,), "the sender is not semisfl"),
            ((honest, "29"), "where"),
            ((honest, "0"), "a call has 1 to 256 images"),
            ((honest, "257"), "a call has 1 to 256 images"),
            ((honest, "-1"), "a call has 1 to 256 images"),
            ((honest, "30", "fp99"), "codec 'fp99' is not known"),
            ((honest, "30", "fp16"), "where"),
            ((not_finite,), "NaN or Inf"),
            ((honest[:-16],), "needs"),
        ):
            with pytest.raises(grpc.RpcError) as error:
                call(*arguments)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT, arguments[1:]  # type: ignore[attr-defined]
            assert reason in error.value.details(), error.value.details()  # type: ignore[attr-defined]
        call(honest)
        with pytest.raises(grpc.RpcError) as error:
            call(bytes(split_inference.LARGEST_CALL + 1))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
        call(honest)


def test_a_device_that_joins_is_told_that_nothing_is_trained_there(
    address: str, images: Path, authority: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    camera = ["--certs", str(authority / "clients" / "camera")]
    assert main(["join", address, "--data", str(images), *camera]) == 4
    assert (
        f"{address} trains nothing; is it `semisfl serve` of this version? For a trained model use "
        "`semisfl classify`"
    ) in capsys.readouterr().err


def test_a_revoked_certificate_has_the_exit_code_of_join(
    address: str, images: Path, authority: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certs.make_client(authority, "taken")
    certs.revoke(authority, "taken")
    camera = ["--certs", str(authority / "clients" / "taken")]
    for words in (["classify", address, str(images)], ["inspect", address]):
        assert main([*words, *camera]) == 5
        assert "refuses: the certificate of taken is revoked" in capsys.readouterr().err


def test_a_port_in_use_is_one_line(
    trained: Trained, address: str, authority: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(trained("semisfl")[0])
    words = ["serve-model", run, "--certs", str(authority)]
    for more, reason in (
        (["--listen", address], f"cannot listen on {address}"),
        (["--listen", "nowhere"], "'nowhere' is not HOST:PORT"),
        (["--insecure-loopback", "--listen", "192.0.2.1:1"], "not a loopback address"),
        (["--listen", "127.0.0.1:0", "--cut", "nowhere"], "'nowhere' is no layer of the model"),
        (["--listen", "127.0.0.1:0", "--certs", "nowhere"], "nowhere"),
    ):
        capsys.readouterr()
        assert main([*words, *more]) == 2
        line = capsys.readouterr().err.strip().splitlines()[-1]
        assert line.startswith("error: ") and reason in line, line


# --- processes -----------------------------------------------------------------------------------


def test_both_commands(
    trained: Trained,
    images: Path,
    authority: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, bad = str(trained("fedswitch")[0]), tmp_path / "bad.png"
    bad.write_text("no image")
    server = Forked(
        [
            *(sys.executable, "-m", "semisfl", "serve-model", run),
            *("--listen", "127.0.0.1:0", "--certs", str(authority)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr is not None
        digest = server.stderr.readline().split()[-1]
        line = server.stderr.readline()
        port = re.match(r"listening on port (\d+)", line)
        assert port, line
        words = ["classify", f"localhost:{port[1]}", str(images), str(bad), "--json", "--codec"]
        camera = ["--certs", str(authority / "clients" / "camera"), "--accept", digest]
        capsys.readouterr()
        assert main([*words, "fp16", *camera]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert main([*words, "nosuch", *camera]) == 2
        assert "codec = 'nosuch' is not known" in capsys.readouterr().err
        assert main([*words[:2], str(bad), *camera]) == 2
        assert "none of 1 image could be read" in capsys.readouterr().err
        assert main(words[:-2]) == 2
        assert "classify needs --certs DIR" in capsys.readouterr().err
        server.send_signal(signal.SIGTERM)
        out, errors = server.communicate(timeout=60)
        assert server.returncode == 0 and "stopped after 24 images" in out
        assert "stopping; once more" in errors  # it has no iterations to wait for
    finally:
        server.kill()
        server.wait()
    expected = load(run).predict(images)
    assert [row["image"] for row in answer["images"]] == expected.names
    for row, best in zip(answer["images"], expected.top(3), strict=True):
        for entry, (_, probability) in zip(row["classes"], best, strict=True):
            assert entry["probability"] == pytest.approx(probability, abs=2e-3)
    assert [skipped["image"] for skipped in answer["skipped"]] == [str(bad)]
