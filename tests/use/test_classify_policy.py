"""`classify` obeys the device's policy, whatever the server says and whoever made the file of the bottom."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from PIL import Image
from torch import Tensor

from semisfl.cli.main import main
from semisfl.fleet.codec import codec_named
from semisfl.net.client.allowance import Allowance, beside
from semisfl.net.client.owner import Approval, Owner
from semisfl.settings.policy import DevicePolicy, PolicyBreach, row_bits
from semisfl.use import onnx_file
from semisfl.use.classifier import Classifier
from semisfl.use.model_server import ModelServer
from semisfl.use.split_inference import ServedModel, text_of_model
from tests import toy
from tests.use.serving import accepting, connect, overheard, served

PIXELS = toy.dataset().test_images[:8]
NOISY: dict[str, Any] = {"clip": 2.0, "noise": 0.3, "update_clip": 1.0, "update_noise": 0.1}


@pytest.fixture
def server(
    model: Classifier, authority: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ModelServer]:
    monkeypatch.setenv("SEMISFL_CACHE", str(tmp_path / "cache"))
    with served(model, authority) as one:
        yield one


def owner(server: ModelServer, policy: DevicePolicy, spent: Path | None = None) -> Owner:
    return Owner(policy, allowance=Allowance(spent), approval=accepting(server))


# --- the model -----------------------------------------------------------------------------------


def test_nothing_is_downloaded_or_sent_before_the_owner_accepts_the_model(
    server: ModelServer, authority: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server._model.network.bottom, "state_dict", lambda: pytest.fail("sent"))
    rows = overheard(server, monkeypatch)
    for accepted in ([], ["sha256:" + "0" * 64]):
        with pytest.raises(PolicyBreach, match=server.served.digest):
            connect(server, authority, owner=Owner(approval=Approval(accepted)))
    assert not rows and not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "change",
    [{"bottom": "0" * 32}, {"mean": (0.25, 0.5, 0.5)}, {"std": (0.75, 0.5, 0.5)}, {"cut": 1}],
)
def test_a_changed_model_must_be_accepted_again(
    change: dict[str, Any], server: ModelServer, authority: Path
) -> None:
    accepted = Owner(approval=accepting(server))
    with connect(server, authority, owner=accepted):
        pass
    changed = server._model.recut(1) if "cut" in change else server._model
    server.served = ServedModel(**{**dict(ServedModel.of(changed)), **change})
    with pytest.raises(PolicyBreach):
        connect(server, authority, owner=accepted)


def test_the_owner_sees_the_layers_and_no_control_characters(server: ModelServer) -> None:
    plain = json.loads(server.served.model_dump_json())
    plain["layers"][0]["name"] = "safe_flatten"
    plain["classes"][0] = "\x1b[2Jcat"
    model = ServedModel.from_json(json.dumps(plain))
    text = text_of_model(model)
    assert "1 conv " in text and "(safe_flatten)" in text and model.digest in text
    assert "\x1b" not in text + model.classes[0]


# --- what leaves ---------------------------------------------------------------------------------


def test_features_are_clipped_and_noisy_and_the_noise_is_not_repeated(
    server: ModelServer, authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = overheard(server, monkeypatch)
    own, deviation = server._model.features(PIXELS), NOISY["noise"] * NOISY["clip"]
    limits = owner(server, DevicePolicy(**NOISY))
    with connect(server, authority, owner=limits) as client:
        for _ in range(200):
            client.predict(PIXELS)
        bits = row_bits(server.served.features, NOISY["noise"])
        assert f"at most {bits:.1f} bits of each image" in client.summary
    sent = torch.stack(rows)
    assert float(sent.std(0).mean()) == pytest.approx(deviation, rel=0.02)
    clipped = own * (NOISY["clip"] / own.norm(dim=1, keepdim=True).clamp(min=NOISY["clip"]))
    # The mean of 200 answers shows the clipped row, and nothing of its length beyond.
    torch.testing.assert_close(sent.mean(0), clipped, rtol=0, atol=6 * deviation / math.sqrt(200))
    assert float(own.norm(dim=1).max()) > 2 * NOISY["clip"], "the clip is at work"


def test_the_policys_codec_is_used_and_a_finer_one_refused(
    server: ModelServer, authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = overheard(server, monkeypatch)
    strict = owner(server, DevicePolicy(codec="int4"))
    with connect(server, authority, owner=strict) as client:
        client.predict(PIXELS)
    (sent,) = rows
    expected = codec_named("int4").roundtrip(server._model.features(PIXELS))
    torch.testing.assert_close(sent, expected)
    for codec in ("fp32", "int8"):
        with pytest.raises(PolicyBreach, match=f"--codec = '{codec}' is finer than the policy's"):
            connect(server, authority, owner=strict, codec=codec)


# --- caps ----------------------------------------------------------------------------------------


def images_in(folder: Path, count: int) -> list[Path]:
    folder.mkdir(exist_ok=True)
    files = [folder / f"{number}.png" for number in range(count)]
    for number, file in enumerate(files):
        Image.fromarray(PIXELS[number].numpy().transpose(1, 2, 0)).save(file)
    return files


def test_uses_of_an_image_are_counted_by_what_it_holds(
    server: ModelServer, authority: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = overheard(server, monkeypatch)
    spent = beside(tmp_path / "policy.toml")
    files = images_in(tmp_path / "photos", 3)
    copy = tmp_path / "copy.png"
    copy.write_bytes(files[0].read_bytes())

    def ask(*pictures: Path) -> None:
        limits = owner(server, DevicePolicy(uses_per_image=2), spent)
        with connect(server, authority, owner=limits) as client:
            client.predict(list(pictures))

    ask(*files)
    ask(copy)
    for again in ((files[0],), (files[1], copy), (files[1], files[1])):
        before = len(rows)
        with pytest.raises(PolicyBreach, match="an image would be used 3 times"):
            ask(*again)
        assert len(rows) == before, "nothing leaves beyond a cap"
    ask(*files[1:])
    assert spent.stat().st_mode & 0o777 == 0o600


def test_bits_are_counted_for_each_image_and_together_with_training(
    server: ModelServer, authority: Path, tmp_path: Path
) -> None:
    each = row_bits(server.served.features, NOISY["noise"])
    policy = DevicePolicy(**NOISY, bits_per_image=2.5 * each)
    spent = beside(tmp_path / "policy.toml")

    def ask(images: Tensor) -> None:
        with connect(server, authority, owner=owner(server, policy, spent)) as client:
            client.predict(images)

    ask(PIXELS[:4])
    ask(PIXELS[:1])
    with pytest.raises(PolicyBreach, match="bits about an image, the policy has bits_per_image"):
        ask(PIXELS[:1])
    ask(PIXELS[4:])
    counted = Allowance(spent)
    assert counted.total.bits == pytest.approx(2 * each) and counted.total.uses == 2
    # A round of training counts them too, and is counted by the next call.
    spent.write_text(json.dumps({"rounds": 1, "uses": 1, "bits": 2 * each}))
    with pytest.raises(PolicyBreach, match="bits about an image, the policy has bits_per_image"):
        ask(PIXELS[:1])


# --- the command ---------------------------------------------------------------------------------


def test_the_command_obeys_the_policy(
    server: ModelServer, authority: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest, camera = server.served.digest, tmp_path / "camera"
    shutil.copytree(authority / "clients" / "camera", camera)
    policy = tmp_path / "policy.toml"
    policy.write_text("uses_per_image = 2\n")
    address, (photo,) = f"localhost:{server.port}", images_in(tmp_path / "photos", 1)
    words = ["classify", address, str(photo), "--certs", str(camera), "--policy", str(policy)]
    assert main(words) == 6
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"--accept {digest}" in line and "semisfl inspect" in line
    assert main(["inspect", address, "--certs", str(camera)]) == 0
    assert f"terms       {digest}" in capsys.readouterr().out
    assert main([*words, "--accept", digest]) == 0
    assert "has no bound in bits" in capsys.readouterr().err
    assert [main(words), main(words)] == [0, 6], "the digest is remembered, and uses are counted"
    policy.write_text(f'model = "sha256:{"0" * 64}"\n')
    assert main([*words, "--accept", digest]) == 6


# --- a file of a stranger as the bottom ----------------------------------------------------------


@pytest.fixture
def bottom(model: Classifier, tmp_path: Path) -> onnx.ModelProto:
    """Return an ONNX model that calls itself the bottom; its node "rows" gives the features of each image."""
    features, node, make = model.network.features, onnx.helper.make_node, onnx.helper.make_tensor
    named, number = onnx.helper.make_tensor_value_info, onnx.TensorProto.FLOAT
    pixels = math.prod(model.shape)
    matrix = torch.rand(pixels, features, generator=torch.Generator().manual_seed(0))
    graph = onnx.helper.make_graph(
        [
            node("Cast", ["images"], ["values"], to=number),
            node("Flatten", ["values"], ["flat"]),
            node("MatMul", ["flat", "matrix"], ["rows"]),
            node("Gather", ["rows", "zero"], ["first"]),
        ],
        "bottom",
        [named("images", onnx.TensorProto.UINT8, ["n", *model.shape])],
        [named("features", number, None)],
        [
            make("matrix", number, [pixels, features], matrix.numpy().tobytes(), raw=True),
            make("zero", onnx.TensorProto.INT64, [1], [0]),
        ],
    )
    file = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    file.ir_version = 8
    about = {"identity": model.identity, "part": "bottom"}
    onnx.helper.set_model_props(file, {onnx_file.ABOUT: json.dumps(about)})
    return file


def saved(file: onnx.ModelProto, place: Path, kind: str, inputs: list[str], **how: Any) -> Path:
    """Write the file with a last node of this ``kind``."""
    file.graph.node.append(onnx.helper.make_node(kind, inputs, ["features"], **how))
    onnx.save(file, place / "bottom.onnx")
    return place / "bottom.onnx"


def test_a_file_that_mixes_images_shows_no_more_of_each(
    bottom: onnx.ModelProto, server: ModelServer, authority: Path, tmp_path: Path
) -> None:
    """Every row of a call could be about one image."""
    path = saved(bottom, tmp_path, "Add", ["rows", "first"])
    noisy = owner(server, DevicePolicy(**NOISY))
    with connect(server, authority, bottom=path, owner=noisy) as client:
        compute = client._encoder.bottom
        together, alone = compute(PIXELS[:2])[1], compute(PIXELS[1:2])[0]
        torch.testing.assert_close(together, alone, rtol=0, atol=0)


@pytest.mark.parametrize("policy", [NOISY, {}], ids=["noise", "none"])
def test_a_file_that_gives_more_rows_than_images_sends_nothing(
    policy: dict[str, Any],
    bottom: onnx.ModelProto,
    server: ModelServer,
    authority: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bits are counted for one row of each image."""
    rows = overheard(server, monkeypatch)
    path = saved(bottom, tmp_path, "Concat", ["rows", "rows"], axis=0)
    device = owner(server, DevicePolicy(**policy))
    with (
        connect(server, authority, bottom=path, owner=device) as client,
        pytest.raises(ValueError, match="the bottom gives"),
    ):
        client.predict(PIXELS[:3])
    assert not rows


def test_a_file_whose_weights_lie_in_another_one_is_refused(
    bottom: onnx.ModelProto, server: ModelServer, authority: Path, tmp_path: Path
) -> None:
    """The other file could be the key of this device: features would show it."""
    matrix = bottom.graph.initializer[0]
    (tmp_path / "client.key").write_bytes(matrix.raw_data)
    path = saved(bottom, tmp_path, "Identity", ["rows"])
    with connect(server, authority, bottom=path):
        pass
    matrix.ClearField("raw_data")
    matrix.data_location = onnx.TensorProto.EXTERNAL
    matrix.external_data.add(key="location", value="client.key")
    path.write_bytes(bottom.SerializeToString())
    with pytest.raises(ValueError, match="takes weights from another file"):
        connect(server, authority, bottom=path)


def test_a_file_that_could_run_for_ever_is_refused(
    bottom: onnx.ModelProto, server: ModelServer, authority: Path, tmp_path: Path
) -> None:
    helper, number = onnx.helper, onnx.TensorProto
    named = helper.make_tensor_value_info
    flag, value = named("go", number.BOOL, []), named("rows", number.FLOAT, None)
    body = helper.make_graph([], "body", [named("i", number.INT64, []), flag], [flag, value])
    bottom.graph.node.append(helper.make_node("Loop", ["", "go"], ["many"], body=body))
    path = saved(bottom, tmp_path, "Identity", ["rows"])
    with pytest.raises(ValueError, match="it has the operator Loop"):
        connect(server, authority, bottom=path)
