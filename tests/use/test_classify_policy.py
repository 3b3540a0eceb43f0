"""A server of split inference that knows the source and wants images; the device has a policy."""

import json
import math
from collections.abc import Callable, Iterator
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
from semisfl.net.client.owner import Approval, NotAccepted, Owner
from semisfl.settings.bits import row_bits
from semisfl.settings.policy import DevicePolicy, PolicyBreach
from semisfl.use import onnx_file
from semisfl.use.classifier import Classifier
from semisfl.use.export import export
from semisfl.use.model_server import ModelServer
from semisfl.use.served_model import ServedModel, text_of_model
from tests import toy
from tests.net.harness import AcceptsAll
from tests.net.rogue_server import run_device
from tests.use.serving import connect, served

PIXELS = toy.dataset().test_images[:8]
NOISY: dict[str, Any] = {"clip": 2.0, "noise": 0.3, "update_clip": 1.0, "update_noise": 0.1}
Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SEMISFL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def server(model: Classifier, authority: Path) -> Iterator[ModelServer]:
    with served(model, authority) as one:
        yield one


def owner(policy: DevicePolicy | None = None, **how: Any) -> Owner:
    return Owner(policy or DevicePolicy(), approval=AcceptsAll(), **how)


def address(server: ModelServer) -> str:
    return f"localhost:{server.port}"


def lie(server: ModelServer, change: Change) -> None:
    """Change what the server says about its model."""
    plain = json.loads(server._about)
    change(plain)
    server._about = json.dumps(plain)


def overheard(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return the list in which a server keeps the features that it gets."""
    rows: list[Tensor] = []
    honest = server._model.answer

    def look(features: Tensor) -> Tensor:
        rows.append(features.clone())
        return honest(features)

    monkeypatch.setattr(server._model, "answer", look)
    return rows


# --- the model -----------------------------------------------------------------------------------


def test_nothing_is_fetched_or_sent_before_the_owner_accepts_the_model(
    server: ModelServer, authority: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server._model.network.bottom, "state_dict", lambda: pytest.fail("fetched"))
    rows = overheard(server, monkeypatch)
    assert server.terms is not None
    for accepted in ([], ["sha256:" + "0" * 64]):
        with pytest.raises(NotAccepted, match=server.terms.digest):
            connect(address(server), authority, owner=Owner(approval=Approval(accepted)))
    assert not rows and not cache.exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda plain: plain.update(bottom="0" * 32),
        lambda plain: plain["mean"].__setitem__(0, 0.25),
        lambda plain: plain["std"].__setitem__(0, 0.75),
        lambda plain: plain.update(shape=[3, 9, 8], features=4 * 4 * 4),
        lambda plain: plain["layers"][0].update(padding=2),
    ],
    ids=["weights", "mean", "std", "shape", "layers"],
)
def test_a_changed_model_must_be_accepted_again(
    change: Change, server: ModelServer, authority: Path, cache: Path
) -> None:
    assert server.terms is not None
    accepted = Owner(approval=Approval([server.terms.digest]))
    connect(address(server), authority, owner=accepted).close()
    plain = json.loads(server._about)
    change(plain)
    # The attacker keeps the number of features right, so that only the digest can notice.
    for features in range(1, 3000):
        try:
            other = ServedModel.from_text(json.dumps(plain | {"features": features}))
            break
        except ValueError:
            continue
    lie(server, lambda plain: (change(plain), plain.update(features=other.features)))
    assert other.digest != server.terms.digest
    with pytest.raises(NotAccepted):
        connect(address(server), authority, owner=accepted)


def test_the_owner_sees_the_layers_and_not_their_names(server: ModelServer) -> None:
    assert server.terms is not None
    plain = json.loads(server._about)
    plain["layers"][0]["name"] = "safe_flatten"
    plain["classes"][0] = "\x1b[2Jcat"
    text = text_of_model(ServedModel.from_text(json.dumps(plain)))
    assert "1 conv " in text and "(safe_flatten)" in text
    assert "\x1b" not in text and server.terms.digest in text_of_model(server.terms)


# --- what leaves ---------------------------------------------------------------------------------


def test_features_are_clipped_and_noisy_and_the_noise_is_not_repeated(
    server: ModelServer, authority: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = overheard(server, monkeypatch)
    own = server._model.features(PIXELS)
    with connect(address(server), authority, owner=owner(DevicePolicy(**NOISY))) as client:
        for _ in range(200):
            client.probabilities(PIXELS)
        bits = row_bits(server._model.network.features, NOISY["noise"])
        assert f"at most {bits:.1f} bits of each image" in client.carried
    sent = torch.stack(rows)
    noise = sent - sent.mean(0)
    deviation = NOISY["noise"] * NOISY["clip"]
    assert float(noise.std()) == pytest.approx(deviation, rel=0.02)
    clipped = own * (NOISY["clip"] / own.norm(dim=1, keepdim=True).clamp(min=NOISY["clip"]))
    # The mean of 200 answers shows the clipped row, and nothing of its length beyond.
    error = (sent.mean(0) - clipped).abs().max()
    assert float(error) < 6 * deviation / math.sqrt(200)
    assert float(own.norm(dim=1).max()) > 2 * NOISY["clip"], "the clip is at work"


def test_the_policys_codec_is_used_and_a_finer_one_refused(
    server: ModelServer, authority: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = overheard(server, monkeypatch)
    strict = owner(DevicePolicy(codec="int4"))
    with connect(address(server), authority, owner=strict) as client:
        client.probabilities(PIXELS)
    (sent,) = rows
    expected = codec_named("int4").roundtrip(server._model.features(PIXELS))
    torch.testing.assert_close(sent, expected)
    for codec in ("fp32", "fp16", "int8"):
        with pytest.raises(PolicyBreach, match=f"--codec = '{codec}' is finer than the policy's"):
            connect(address(server), authority, owner=strict, codec=codec)


@pytest.mark.parametrize(
    "policy",
    [
        DevicePolicy(codec="int8"),
        DevicePolicy(**NOISY),
        DevicePolicy(uses_per_image=9),
        DevicePolicy(model=("sha256:" + "0" * 64,)),
        DevicePolicy(full_models=True, codec="int8"),
    ],
    ids=["codec", "noise", "uses", "model", "models and codec"],
)
def test_images_never_leave_under_a_policy_that_limits_features(
    policy: DevicePolicy, model: Classifier, authority: Path, cache: Path
) -> None:
    with served(model, authority, accept_images=True) as server:
        with pytest.raises(PolicyBreach, match="would do nothing for images themselves"):
            connect(address(server), authority, owner=owner(policy), send_images=True)
        # Not even if a mistake elsewhere asks for it.
        with connect(
            address(server), authority, owner=owner(policy), bottom=_file(model, cache)
        ) as client:
            client._bottom = None
            with pytest.raises(PolicyBreach):
                client.probabilities(PIXELS)
        assert server.answered.total() == 0


def _file(model: Classifier, folder: Path) -> Path:
    return export(model, PIXELS, folder, to="safetensors", part="bottom").path


# --- caps ----------------------------------------------------------------------------------------


def images_in(folder: Path, count: int) -> list[Path]:
    folder.mkdir(exist_ok=True)
    files = [folder / f"{number}.png" for number in range(count)]
    for number, file in enumerate(files):
        Image.fromarray(PIXELS[number].numpy().transpose(1, 2, 0)).save(file)
    return files


def test_uses_of_an_image_are_counted_by_what_it_holds(
    server: ModelServer,
    authority: Path,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = overheard(server, monkeypatch)
    spent = beside(tmp_path / "policy.toml")
    files = images_in(tmp_path / "photos", 3)
    copy = tmp_path / "copy.png"
    copy.write_bytes(files[0].read_bytes())

    def ask(*pictures: Path) -> None:
        limits = owner(DevicePolicy(uses_per_image=2), allowance=Allowance(spent))
        with connect(address(server), authority, owner=limits) as client:
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
    server: ModelServer, authority: Path, cache: Path, tmp_path: Path
) -> None:
    each = row_bits(server._model.network.features, NOISY["noise"])
    policy = DevicePolicy(**NOISY, bits_per_image=2.5 * each)
    spent = beside(tmp_path / "policy.toml")

    def ask(images: Tensor) -> None:
        limits = owner(policy, allowance=Allowance(spent))
        with connect(address(server), authority, owner=limits) as client:
            client.predict(images)

    ask(PIXELS[:4])
    ask(PIXELS[:1])
    with pytest.raises(PolicyBreach, match="all that was sent of an image would carry"):
        ask(PIXELS[:1])
    ask(PIXELS[4:])
    counted = Allowance(spent)
    assert counted.total.bits == pytest.approx(9 * each) and counted.total.uses == 2
    # A round of training counts them too, and is counted by the next call.
    spent.write_text(json.dumps({"rounds": 1, "uses": 1, "bits": 10 * 2 * each, "held": 10}))
    with pytest.raises(PolicyBreach, match="all that was sent of an image would carry"):
        ask(PIXELS[:1])


def test_a_server_cannot_lower_the_bits_by_the_number_of_features(
    server: ModelServer, model: Classifier, authority: Path, cache: Path
) -> None:
    limits = owner(DevicePolicy(**NOISY, bits_per_image=1000))
    lie(server, lambda plain: plain.update(features=1))
    with pytest.raises(ValueError, match="features = 1, and the bottom gives"):
        connect(address(server), authority, owner=limits)
    lie(server, lambda plain: plain.update(layers=None))
    with (
        connect(address(server), authority, owner=limits, bottom=_file(model, cache)) as client,
        pytest.raises(ValueError, match=r"the bottom gives .* takes torch.float32 \[8, 1\]"),
    ):
        client.probabilities(PIXELS)
    assert server.answered.total() == 0


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda plain: plain.update(shape=[3, 16384, 16384]), "height = 16384"),
        (lambda plain: plain.update(shape=[3, True, 8]), "True is no whole number"),
        (lambda plain: plain.update(shape=[3, -8, 8]), "height = -8"),
        (lambda plain: plain.update(classes=[]), "classes = 0"),
        (lambda plain: plain.update(classes=[[[]]]), "is no text"),
        (lambda plain: plain.update(std=[0.0, 0.0, 0.0]), "std = 0"),
        (lambda plain: plain.update(mean=[float("nan")] * 3), "mean = nan"),
        (lambda plain: plain.update(mean=[0.5]), "1 means and 3 stds"),
        (lambda plain: plain.update(features=10**12), "features = 1e+12"),
        (lambda plain: plain.update(bottom="../../x"), "the bottom's digest is"),
        (lambda plain: plain.update(cut=99), "cannot be cut at 99"),
        (lambda plain: plain.update(layers=[{"kind": "conv", "channels": 10**9}]), "channels"),
        (lambda plain: plain.update(layers="cnn"), "is not a list of layers"),
    ],
)
def test_numbers_out_of_range_are_refused_before_anything_is_built(
    change: Change, reason: str, server: ModelServer, authority: Path, cache: Path
) -> None:
    lie(server, change)
    with pytest.raises(ValueError) as error:
        connect(address(server), authority, owner=owner())
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_an_answer_that_is_larger_than_it_can_be_is_not_received(
    server: ModelServer, authority: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_about", "x" * 120_000_000)
    monkeypatch.setattr(
        "semisfl.use.model_server._joined",
        lambda kind, fields, tensors: str(fields).encode(),
    )
    photo = images_in(tmp_path / "photos", 1)[0]
    words = ["classify", address(server), str(photo), "--certs", str(authority / "clients/camera")]
    ended = run_device(words, most=100_000_000)
    assert ended.status == 4 and "larger than max" in ended.output, ended


# --- the command ---------------------------------------------------------------------------------


def test_the_command_obeys_the_policy(
    server: ModelServer,
    authority: Path,
    cache: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert server.terms is not None
    digest, camera = server.terms.digest, tmp_path / "camera"
    camera.mkdir()
    for file in (authority / "clients" / "camera").iterdir():
        (camera / file.name).write_bytes(file.read_bytes())
        (camera / file.name).chmod(0o600)
    files = images_in(tmp_path / "photos", 2)
    policy = tmp_path / "policy.toml"
    policy.write_text("uses_per_image = 2\n")
    words = ["classify", address(server), *map(str, files), "--certs", str(camera)]
    words += ["--policy", str(policy)]
    assert main(words) == 6
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"classify with --accept {digest}" in line and "semisfl inspect" in line
    assert main(["inspect", address(server), "--certs", str(camera)]) == 0
    assert f"terms       {digest}" in capsys.readouterr().out
    assert main([*words, "--accept", digest]) == 0
    assert "has no bound in bits" in capsys.readouterr().err
    assert main(words) == 0, "the answer is remembered"
    assert main(words) == 6
    assert "an image would be used 3 times" in capsys.readouterr().err
    assert main([*words, "--send-images"]) == 6
    assert main([*words, "--codec", "nosuch"]) == 2
    policy.write_text(f'model = "sha256:{"0" * 64}"\n')
    assert main([*words, "--accept", digest]) == 6
    assert f'classify with model = "{digest}" in' in capsys.readouterr().err


def test_class_names_of_a_server_do_not_reach_the_terminal(
    server: ModelServer,
    authority: Path,
    cache: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    evil = ["\x1b]0;owned\x07" + "y" * 5000] * len(server._model.classes)
    lie(server, lambda plain: plain.update(classes=evil))
    assert server.terms is not None
    words = ["classify", address(server), str(images_in(tmp_path / "photos", 1)[0])]
    words += ["--certs", str(authority / "clients" / "camera"), "--accept", server.terms.digest]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "\x07" not in printed and len(printed) < 1000


# --- a file of a stranger as the bottom ----------------------------------------------------------


def bottom_file(model: Classifier, place: Path, kind: str, inputs: list[str], **how: Any) -> Path:
    """Return an ONNX file that calls itself the model's bottom: ``kind`` is its last node, after "rows" and "first"."""
    features, node, make = model.network.features, onnx.helper.make_node, onnx.helper.make_tensor
    shape, number = ["n", *model.shape], onnx.TensorProto.FLOAT
    pixels = math.prod(model.shape)
    matrix = torch.rand(pixels, features, generator=torch.Generator().manual_seed(0))
    graph = onnx.helper.make_graph(
        [
            node("Cast", ["images"], ["values"], to=number),
            node("Flatten", ["values"], ["flat"]),
            node("MatMul", ["flat", "matrix"], ["rows"]),
            node("Gather", ["rows", "zero"], ["first"]),
            node(kind, inputs, ["features"], **how),
        ],
        "bottom",
        [onnx.helper.make_tensor_value_info("images", onnx.TensorProto.UINT8, shape)],
        [onnx.helper.make_tensor_value_info("features", number, None)],
        [
            make("matrix", number, [pixels, features], matrix.numpy().tobytes(), raw=True),
            make("zero", onnx.TensorProto.INT64, [1], [0]),
        ],
    )
    file = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    file.ir_version = 8
    about = {"identity": model.identity, "part": "bottom"}
    onnx.helper.set_model_props(file, {onnx_file.ABOUT: json.dumps(about)})
    onnx.save(file, place / "bottom.onnx")
    return place / "bottom.onnx"


def test_a_file_that_mixes_images_shows_no_more_of_each(
    model: Classifier, server: ModelServer, authority: Path, tmp_path: Path
) -> None:
    """Every row of a call could be about one image."""
    bottom = bottom_file(model, tmp_path, "Add", ["rows", "first"])
    noisy = owner(DevicePolicy(**NOISY))
    with connect(address(server), authority, bottom=bottom, owner=noisy) as client:
        assert client._bottom is not None
        together, alone = client._bottom(PIXELS[:2])[1], client._bottom(PIXELS[1:2])[0]
        torch.testing.assert_close(together, alone, rtol=0, atol=0)


@pytest.mark.parametrize(("policy", "at_once"), [(NOISY, 1), ({}, 3)], ids=["noise", "none"])
def test_a_file_that_gives_more_rows_than_images_sends_nothing(
    policy: dict[str, Any],
    at_once: int,
    model: Classifier,
    server: ModelServer,
    authority: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bits are counted for one row of each image."""
    bottom = bottom_file(model, tmp_path, "Concat", ["rows", "rows"], axis=0)
    device = owner(DevicePolicy(**policy))
    with connect(address(server), authority, bottom=bottom, owner=device) as client:
        monkeypatch.setattr(client.connection, "ask", lambda *_: pytest.fail("sent"))
        gives, takes = (rf"torch.float32 \[{rows}," for rows in (2 * at_once, at_once))
        with pytest.raises(ValueError, match=f"gives {gives} .* takes {takes}"):
            client.probabilities(PIXELS[:3])


def test_a_file_that_gives_two_rows_of_one_image_and_none_of_another_sends_nothing(
    model: Classifier,
    server: ModelServer,
    authority: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many rows as images are no proof: the bits of each image are counted for one row of it."""
    bottom = bottom_file(model, tmp_path, "Compress", ["twice", "both"], axis=0)
    file, node, make = onnx.load(bottom), onnx.helper.make_node, onnx.helper.make_tensor
    last = file.graph.node.pop()
    file.graph.initializer.append(make("dark", onnx.TensorProto.FLOAT, [1], [127.0]))
    file.graph.node.extend(
        [
            node("Concat", ["rows", "rows"], ["twice"], axis=0),
            node("ReduceMax", ["flat"], ["brightest"], axes=[0, 1], keepdims=0),
            node("Greater", ["brightest", "dark"], ["bright"]),
            node("Concat", ["bright", "bright"], ["both"], axis=0),
            last,
        ]
    )
    onnx.save(file, bottom)
    images = torch.zeros(2, *model.shape, dtype=torch.uint8)
    images[0] = 255
    with connect(
        address(server), authority, bottom=bottom, owner=owner(DevicePolicy(**NOISY))
    ) as client:
        monkeypatch.setattr(client.connection, "ask", lambda *_: pytest.fail("sent"))
        with pytest.raises(
            ValueError, match=r"gives torch.float32 \[2, .* takes torch.float32 \[1,"
        ):
            client.probabilities(images)


def test_a_file_whose_weights_lie_in_another_one_is_refused(
    model: Classifier, server: ModelServer, authority: Path, tmp_path: Path
) -> None:
    """The other file could be the key of this device: features would show it."""
    path = bottom_file(model, tmp_path, "Identity", ["rows"])
    connect(address(server), authority, bottom=path).close()
    file = onnx.load(path)
    matrix = file.graph.initializer[0]
    (tmp_path / "client.key").write_bytes(matrix.raw_data)
    matrix.ClearField("raw_data")
    matrix.data_location = onnx.TensorProto.EXTERNAL
    matrix.external_data.add(key="location", value="client.key")
    path.write_bytes(file.SerializeToString())
    with pytest.raises(ValueError, match="takes weights from another file, which could be any"):
        connect(address(server), authority, bottom=path)


@pytest.mark.parametrize("odd", ["Loop", "If", "function"])
def test_a_file_that_could_run_for_ever_is_refused(
    odd: str, model: Classifier, server: ModelServer, authority: Path, tmp_path: Path
) -> None:
    path = bottom_file(model, tmp_path, "Identity", ["rows"])
    file, helper, number = onnx.load(path), onnx.helper, onnx.TensorProto
    if odd == "function":
        inner = [helper.make_node("Identity", ["x"], ["y"])]
        opset = [helper.make_opsetid("", 18)]
        file.functions.append(helper.make_function("own", "Twice", ["x"], ["y"], inner, opset))
    else:
        named = helper.make_tensor_value_info
        flag, value = named("go", number.BOOL, []), named("rows", number.FLOAT, None)
        body = helper.make_graph([], "body", [named("i", number.INT64, []), flag], [flag, value])
        names = {"Loop": ["body"], "If": ["then_branch", "else_branch"]}[odd]
        file.graph.node.append(
            helper.make_node(odd, ["", "go"], ["many"], **dict.fromkeys(names, body))
        )
    onnx.save(file, path)
    with pytest.raises(ValueError, match="it has loops, branches or functions, which could run"):
        connect(address(server), authority, bottom=path)


@pytest.mark.parametrize("text", ["[" * 100_000, "[1]", "{}", '{"identity": "i"}'])
def test_a_file_with_an_odd_description_is_refused(
    text: str, model: Classifier, server: ModelServer, authority: Path, tmp_path: Path
) -> None:
    path = bottom_file(model, tmp_path, "Identity", ["rows"])
    file = onnx.load(path)
    onnx.helper.set_model_props(file, {onnx_file.ABOUT: text})
    onnx.save(file, path)
    with pytest.raises(ValueError, match="was not written by semisfl export"):
        connect(address(server), authority, bottom=path)


@pytest.mark.parametrize("odd", ["two inputs", "two outputs", "a list", "text"])
def test_a_file_with_odd_inputs_or_outputs_is_refused(
    odd: str, model: Classifier, server: ModelServer, authority: Path, tmp_path: Path
) -> None:
    path = bottom_file(model, tmp_path, "Identity", ["rows"])
    file, number = onnx.load(path), onnx.TensorProto.FLOAT
    graph, named = file.graph, onnx.helper.make_tensor_value_info
    if odd == "two inputs":
        graph.input.append(named("more", number, [1]))
    elif odd == "two outputs":
        graph.output.append(named("rows", number, None))
    elif odd == "a list":
        graph.node.append(onnx.helper.make_node("SequenceConstruct", ["rows"], ["list"]))
        graph.output[0].CopyFrom(onnx.helper.make_tensor_sequence_value_info("list", number, None))
    else:
        text = onnx.TensorProto.STRING
        graph.node.append(onnx.helper.make_node("Cast", ["rows"], ["text"], to=text))
        graph.output[0].CopyFrom(named("text", text, None))
    onnx.save(file, path)
    with pytest.raises(ValueError, match="takes one tensor and gives one of float32"):
        connect(address(server), authority, bottom=path)
