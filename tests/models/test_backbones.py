"""The named backbones against independent implementations, number by number, with random weights."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from semisfl.models.build import build
from semisfl.models.split import SplitModel
from tests.toy import start_from

Rename = Callable[[str], str]


def shaken(model: nn.Module) -> nn.Module:
    """Return the model with random weights and statistics, so that a layer that is left out shows."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 2, generator=generator)
            elif tensor.is_floating_point() and tensor.dim() < 2:
                tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return model.eval()


def renamed(state: dict[str, Tensor], rules: list[tuple[str, str | Rename]]) -> dict[str, Tensor]:
    """Return the weights under the names that `rules` give them; the first that fits is taken."""
    result = {}
    for key, tensor in state.items():
        for pattern, name in rules:
            if re.match(pattern, key):
                key = re.sub(pattern, name, key, count=1)  # type: ignore[arg-type]
                break
        result[key] = tensor
    return result


def check(
    name: str,
    side: int,
    weights: dict[str, Tensor],
    file: Path,
    theirs: Callable[[Tensor], Tensor],
    classes: int = 10,
) -> SplitModel:
    """Load `weights` from a file and compare outputs with those of `theirs`, to 1e-5 of the largest."""
    torch.save(weights, file)
    cut = "block1" if not name.startswith(("res", "conv")) else "block1_1"
    model = build(name, (3, side, side), classes, cut=cut, projector="none").eval()
    start_from(model, str(file), name)
    images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected, got = theirs(images), model(images)
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    return model


def test_efficientnet_lite0(tmp_path: Path) -> None:
    package = pytest.importorskip("efficientnet_lite_pytorch")
    theirs = shaken(package.EfficientNet.from_name("efficientnet-lite0", num_classes=10))
    # Its margins are computed for 224 pixels.
    check("efficientnet-lite0", 224, theirs.state_dict(), tmp_path / "w.pth", theirs)


def hugging_face(kind: str, **settings: object) -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(num_labels=10, **settings)
    model = shaken(getattr(transformers, f"{kind}ForImageClassification")(config))
    return model, dict(model.state_dict())


def test_mobilenet_v2(tmp_path: Path) -> None:
    theirs, state = hugging_face(
        "MobileNetV2",
        tf_padding=False,
        layer_norm_eps=1e-5,
        finegrained_output=True,
        first_layer_is_expansion=True,
    )
    parts = {"expand_1x1": "0", "conv_3x3": "1", "reduce_1x1": "2"}

    def torchvision(m: re.Match[str]) -> str:
        place = parts[m[2]] if m[2] != "reduce_1x1" else "2"
        kind = m[3]
        if m[2] == "reduce_1x1":
            return f"features.{int(m[1]) + 2}.conv.{'2' if kind == 'convolution' else '3'}."
        return f"features.{int(m[1]) + 2}.conv.{place}.{'0' if kind == 'convolution' else '1'}."

    rules: list[tuple[str, str | Rename]] = [
        (r"mobilenet_v2\.conv_stem\.first_conv\.convolution\.", "features.0.0."),
        (r"mobilenet_v2\.conv_stem\.first_conv\.normalization\.", "features.0.1."),
        (r"mobilenet_v2\.conv_stem\.conv_3x3\.convolution\.", "features.1.conv.0.0."),
        (r"mobilenet_v2\.conv_stem\.conv_3x3\.normalization\.", "features.1.conv.0.1."),
        (r"mobilenet_v2\.conv_stem\.reduce_1x1\.convolution\.", "features.1.conv.1."),
        (r"mobilenet_v2\.conv_stem\.reduce_1x1\.normalization\.", "features.1.conv.2."),
        (r"mobilenet_v2\.layer\.(\d+)\.(\w+)\.(convolution|normalization)\.", torchvision),
        (r"mobilenet_v2\.conv_1x1\.convolution\.", "features.18.0."),
        (r"mobilenet_v2\.conv_1x1\.normalization\.", "features.18.1."),
        (r"classifier\.", "classifier.1."),
    ]
    weights = renamed(state, rules)
    model = check("mobilenet-v2", 96, weights, tmp_path / "w.pth", lambda x: theirs(x).logits)
    images = torch.randn(1, 3, 96, 96)
    expected = model(images)
    # The same weights under timm's names.
    first = {"conv.0.0": "conv_dw", "conv.0.1": "bn1", "conv.1": "conv_pw", "conv.2": "bn2"}
    usual = {"conv.0.0": "conv_pw", "conv.0.1": "bn1", "conv.1.0": "conv_dw", "conv.1.1": "bn2"}
    usual |= {"conv.2": "conv_pwl", "conv.3": "bn3"}
    before = [1, 2, 4, 7, 11, 14, 17]

    def timm(m: re.Match[str]) -> str:
        number = int(m[1])
        stage = max(i for i, start in enumerate(before) if start <= number)
        names = first if number == 1 else usual
        return f"blocks.{stage}.{number - before[stage]}.{names[m[2]]}."

    other = renamed(
        weights,
        [
            (r"features\.0\.0\.", "conv_stem."),
            (r"features\.0\.1\.", "bn1."),
            (r"features\.18\.0\.", "conv_head."),
            (r"features\.18\.1\.", "bn2."),
            (r"classifier\.1\.", "classifier."),
            (r"features\.(\d+)\.(conv\.\d(?:\.\d)?)\.(?=[a-z])", timm),
        ],
    )
    torch.save(other, tmp_path / "timm.pth")
    again = build("mobilenet-v2", (3, 96, 96), 10, cut="block3", projector="none").eval()
    start_from(again, str(tmp_path / "timm.pth"), "mobilenet-v2")
    assert torch.equal(again(images), expected)


@pytest.mark.parametrize(
    ("name", "depths", "kind", "widths"),
    [
        ("resnet18-imagenet", [2, 2, 2, 2], "basic", [64, 128, 256, 512]),
        ("resnet50", [3, 4, 6, 3], "bottleneck", [256, 512, 1024, 2048]),
    ],
)
def test_resnets(
    name: str, depths: list[int], kind: str, widths: list[int], tmp_path: Path
) -> None:
    theirs, state = hugging_face("ResNet", depths=depths, layer_type=kind, hidden_sizes=widths)
    rules: list[tuple[str, str | Rename]] = [
        (r"resnet\.embedder\.embedder\.convolution\.", "conv1."),
        (r"resnet\.embedder\.embedder\.normalization\.", "bn1."),
        (
            r"resnet\.encoder\.stages\.(\d)\.layers\.(\d)\.shortcut\.convolution\.",
            lambda m: f"layer{int(m[1]) + 1}.{m[2]}.downsample.0.",
        ),
        (
            r"resnet\.encoder\.stages\.(\d)\.layers\.(\d)\.shortcut\.normalization\.",
            lambda m: f"layer{int(m[1]) + 1}.{m[2]}.downsample.1.",
        ),
        (
            r"resnet\.encoder\.stages\.(\d)\.layers\.(\d)\.layer\.(\d)\.convolution\.",
            lambda m: f"layer{int(m[1]) + 1}.{m[2]}.conv{int(m[3]) + 1}.",
        ),
        (
            r"resnet\.encoder\.stages\.(\d)\.layers\.(\d)\.layer\.(\d)\.normalization\.",
            lambda m: f"layer{int(m[1]) + 1}.{m[2]}.bn{int(m[3]) + 1}.",
        ),
        (r"classifier\.1\.", "fc."),
    ]
    check(name, 96, renamed(state, rules), tmp_path / "w.pth", lambda x: theirs(x).logits)


def test_convnext(tmp_path: Path) -> None:
    theirs, state = hugging_face("ConvNext", layer_norm_eps=1e-6)
    parts = {"dwconv": "conv_dw", "layernorm": "norm", "pwconv1": "mlp.fc1", "pwconv2": "mlp.fc2"}
    to_timm: list[tuple[str, str | Rename]] = [
        (r"convnext\.embeddings\.patch_embeddings\.", "stem.0."),
        (r"convnext\.embeddings\.layernorm\.", "stem.1."),
        (
            r"convnext\.encoder\.stages\.(\d)\.downsampling_layer\.(\d)\.",
            r"stages.\1.downsample.\2.",
        ),
        (
            r"convnext\.encoder\.stages\.(\d)\.layers\.(\d+)\.layer_scale_parameter",
            r"stages.\1.blocks.\2.gamma",
        ),
        (
            r"convnext\.encoder\.stages\.(\d)\.layers\.(\d+)\.(\w+)\.",
            lambda m: f"stages.{m[1]}.blocks.{m[2]}.{parts[m[3]]}.",
        ),
        (r"convnext\.layernorm\.", "head.norm."),
        (r"classifier\.", "head.fc."),
    ]
    timm = renamed(state, to_timm)
    check("convnext-tiny", 96, timm, tmp_path / "w.pth", lambda x: theirs(x).logits)
    numbers = {"conv_dw": "block.0", "norm": "block.2", "mlp.fc1": "block.3", "mlp.fc2": "block.5"}
    to_torchvision: list[tuple[str, str | Rename]] = [
        (r"stem\.", "features.0."),
        (r"stages\.(\d)\.downsample\.(\d)\.", lambda m: f"features.{2 * int(m[1])}.{m[2]}."),
        (
            r"stages\.(\d)\.blocks\.(\d+)\.gamma",
            lambda m: f"features.{2 * int(m[1]) + 1}.{m[2]}.layer_scale",
        ),
        (
            r"stages\.(\d)\.blocks\.(\d+)\.(conv_dw|norm|mlp\.fc\d)\.",
            lambda m: f"features.{2 * int(m[1]) + 1}.{m[2]}.{numbers[m[3]]}.",
        ),
        (r"head\.norm\.", "classifier.0."),
        (r"head\.fc\.", "classifier.2."),
    ]
    torchvision = renamed(timm, to_torchvision)
    check("convnext-tiny", 96, torchvision, tmp_path / "t.pth", lambda x: theirs(x).logits)


@pytest.mark.parametrize(
    ("name", "kind", "side"), [("vit-small-16", "ViT", 96), ("vit-small-14", "Dinov2", 98)]
)
def test_vision_transformers(name: str, kind: str, side: int, tmp_path: Path) -> None:
    theirs, state = hugging_face(
        kind,
        hidden_size=384,
        num_attention_heads=6,
        num_hidden_layers=12,
        intermediate_size=1536,
        image_size=side,
        patch_size=int(name[-2:]),
        layer_norm_eps=1e-6,
    )
    weights: dict[str, Tensor] = {}
    for key, tensor in state.items():
        key = re.sub(r"^(vit|dinov2)\.", "", key)
        key = key.replace("embeddings.cls_token", "cls_token").replace(
            "embeddings.position_embeddings", "pos_embed"
        )
        key = key.replace("embeddings.patch_embeddings.projection", "patch_embed.proj")
        key = re.sub(r"^(?:encoder\.)?layers?\.", "blocks.", key)
        weights[key] = tensor
    ours: dict[str, Tensor] = {}
    for key, tensor in weights.items():
        if (
            m := re.match(r"blocks\.(\d+)\.attention\.(?:attention\.)?(query|q_proj)\.(\w+)", key)
        ) is not None:
            others = [
                weights[key.replace(m[2], n)]
                for n in (
                    ("query", "key", "value") if m[2] == "query" else ("q_proj", "k_proj", "v_proj")
                )
            ]
            ours[f"blocks.{m[1]}.attn.qkv.{m[3]}"] = torch.cat(others)
            continue
        for pattern, new in (
            (r"(blocks\.\d+)\.(?:layernorm_before|norm1)\.", r"\1.norm1."),
            (r"(blocks\.\d+)\.(?:layernorm_after|norm2)\.", r"\1.norm2."),
            (r"(blocks\.\d+)\.attention\.(?:output\.dense|o_proj)\.", r"\1.attn.proj."),
            (r"(blocks\.\d+)\.(?:intermediate\.dense|mlp\.fc1)\.", r"\1.mlp.fc1."),
            (r"(blocks\.\d+)\.(?:output\.dense|mlp\.fc2)\.", r"\1.mlp.fc2."),
            (r"(blocks\.\d+)\.layer_scale(\d)\.lambda1", r"\1.ls\2.gamma"),
            (r"layernorm\.", "norm."),
        ):
            key = re.sub(f"^{pattern}", new, key)
        ours[key] = tensor
    file = tmp_path / "w.pth"
    torch.save(ours, file)
    model = build(name, (3, side, side), 10, cut="block1", projector="none").eval()
    start_from(model, str(file), name)
    images = torch.randn(2, 3, side, side)
    with torch.no_grad():
        base = theirs.vit if kind == "ViT" else theirs.dinov2
        expected = base(images).last_hidden_state[:, 0]
        got = torch.nn.Sequential(*list(model.top)[:-1])(model.bottom(images))
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
