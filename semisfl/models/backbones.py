"""Networks whose trained weights many people share, as layer tables: their bottoms can be brought to devices.

Layers here have short names, and each table ends with a linear layer for the classes of the run. `WEIGHT_NAMES`
maps the names that torchvision, timm and others give the weights to the names here. Widths, depths and epsilons
are those of the published networks: weights that are loaded would otherwise compute something else.
"""

import re
from collections.abc import Callable, Sequence

from semisfl.settings.layer_kinds import (
    Attention,
    AveragePool,
    BatchNorm,
    Block,
    ClassToken,
    Conv,
    Drop,
    FirstToken,
    Flatten,
    Gelu,
    Layer,
    LayerNorm,
    Linear,
    Pool,
    Positions,
    Relu,
    Relu6,
    ResidualBlock,
    Scale,
    Tokens,
)


def conv(name: str, width: int, kernel: int, stride: int = 1, **more: object) -> Conv:
    """Return a convolution without bias that keeps the size of a picture, but for its stride.

    ``more`` replaces or adds settings of the layer.
    """
    values = {"padding": kernel // 2, "bias": False, **more}
    return Conv.model_validate(
        {"name": name, "channels": width, "kernel": kernel, "stride": stride, **values}
    )


# --- mobile networks: blocks of expansion, depthwise convolution and projection ---------------------------


def _inverted(
    name: str, takes: int, gives: int, kernel: int, stride: int, expand: int, same: bool, eps: float
) -> Layer:
    """Return an inverted residual block (Sandler et al. 2018): expand the channels, convolve each, project them back.

    ``takes`` and ``gives``: channels; ``expand``: by how much the block is wider inside; ``same``: whether margins are
    TensorFlow's; ``eps``: BatchNorm's. Input and output are added where their shapes are the same.
    """
    width, pad = takes * expand, "same" if same else kernel // 2
    body: list[Layer] = []
    if expand != 1:
        body += [conv("expand", width, 1), BatchNorm(name="bn0", eps=eps), Relu6(name="relu0")]
    body += [
        conv("depthwise", width, kernel, stride, groups=width, padding=pad),
        BatchNorm(name="bn1", eps=eps),
        Relu6(name="relu1"),
        conv("project", gives, 1),
        BatchNorm(name="bn2", eps=eps),
    ]
    kind = ResidualBlock if stride == 1 and takes == gives else Block
    return kind(name=name, body=tuple(body))


Group = tuple[int, int, int, int, int]
"""Kernel, stride of its first block, expansion, channels and number of blocks."""
MOBILENET_V2: tuple[Group, ...] = (
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (3, 2, 6, 32, 3),
    (3, 2, 6, 64, 4),
    (3, 1, 6, 96, 3),
    (3, 2, 6, 160, 3),
    (3, 1, 6, 320, 1),
)
"""The network of Sandler et al. 2018: 17 blocks."""
EFFICIENTNET_LITE0: tuple[Group, ...] = (
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (5, 2, 6, 40, 2),
    (3, 2, 6, 80, 3),
    (5, 1, 6, 112, 3),
    (5, 2, 6, 192, 4),
    (3, 1, 6, 320, 1),
)
"""EfficientNet-Lite0, which Google made from Tan and Le 2019 for devices: 16 blocks."""


def mobile(groups: Sequence[Group], same: bool, eps: float) -> list[Layer]:
    """Return a mobile network of ``groups`` of inverted blocks; ``same`` and ``eps`` are those of the blocks."""
    layers: list[Layer] = [
        conv("conv_stem", 32, 3, 2, padding="same" if same else 1),
        BatchNorm(name="bn_stem", eps=eps),
        Relu6(name="relu_stem"),
    ]
    takes, number = 32, 0
    for kernel, stride, expand, gives, count in groups:
        for index in range(count):
            number += 1
            step = stride if index == 0 else 1
            layers.append(
                _inverted(f"block{number}", takes, gives, kernel, step, expand, same, eps)
            )
            takes = gives
    return [
        *layers,
        conv("conv_head", 1280, 1),
        BatchNorm(name="bn_head", eps=eps),
        Relu6(name="relu_head"),
        AveragePool(name="avgpool"),
        Flatten(name="flatten"),
        Drop(name="drop", p=0.2),
        Linear(name="fc"),
    ]


# --- residual networks for large pictures -----------------------------------------------------------------


def resnet(depths: Sequence[int], bottleneck: bool) -> list[Layer]:
    """Return a network of He et al. 2016 with its 7 x 7 stem, for large pictures; ``depths``: blocks per group.

    The stride is in the 3 x 3 convolutions, as torchvision has it.

    ``bottleneck``: blocks of 1 x 1, 3 x 3 and 1 x 1 convolutions that are four times as wide outside as inside.
    """
    layers: list[Layer] = [
        conv("conv1", 64, 7, 2),
        BatchNorm(name="bn1"),
        Relu(name="relu1"),
        Pool(name="pool1", size=3, stride=2, padding=1),
    ]
    takes = 64
    for group, (width, depth) in enumerate(zip((64, 128, 256, 512), depths, strict=True), start=1):
        for number in range(1, depth + 1):
            stride, gives = (
                (2 if group > 1 and number == 1 else 1),
                width * (4 if bottleneck else 1),
            )
            # (kernel, channels, stride) of each convolution
            plan = [(1, width, 1), (3, width, stride), (1, gives, 1)]
            body: list[Layer] = []
            for index, (kernel, channels, step) in enumerate(
                plan if bottleneck else [(3, width, stride), (3, gives, 1)], 1
            ):
                body += [
                    conv(f"conv{index}", channels, kernel, step),
                    BatchNorm(name=f"bn{index}"),
                    Relu(name=f"relu{index}"),
                ]
            other = stride > 1 or takes != gives
            shortcut = (conv("conv", gives, 1, stride), BatchNorm(name="bn")) if other else ()
            block = ResidualBlock(name="sum", body=tuple(body[:-1]), shortcut=shortcut)
            layers.append(Block(name=f"block{group}_{number}", body=(block, Relu(name="relu"))))
            takes = gives
    return [*layers, AveragePool(name="avgpool"), Flatten(name="flatten"), Linear(name="fc")]


# --- ConvNeXt and vision transformers ---------------------------------------------------------------------


def convnext_tiny() -> list[Layer]:
    """Return ConvNeXt-Tiny of Liu et al. 2022: 18 blocks, LayerNorm at each position.

    A block is a 7 x 7 depthwise convolution and two 1 x 1 convolutions, added to its input after a learned factor.
    """

    def norm(name: str) -> LayerNorm:
        """Return LayerNorm over the channels at each position."""
        return LayerNorm(name=name, eps=1e-6, per_position=True)

    layers: list[Layer] = [
        Conv(name="conv_stem", channels=96, kernel=4, stride=4),
        norm("norm_stem"),
    ]
    for group, (width, depth) in enumerate(zip((96, 192, 384, 768), (3, 3, 9, 3), strict=True), 1):
        if group > 1:
            layers += [
                norm(f"norm{group}"),
                Conv(name=f"down{group}", channels=width, kernel=2, stride=2),
            ]
        for number in range(1, depth + 1):
            body = (
                conv("depthwise", width, 7, groups=width, bias=True),
                norm("norm"),
                Conv(name="fc1", channels=4 * width, kernel=1),
                Gelu(name="gelu"),
                Conv(name="fc2", channels=width, kernel=1),
                Scale(name="scale", start=1e-6),
            )
            layers.append(ResidualBlock(name=f"block{group}_{number}", body=body))
    return [
        *layers,
        AveragePool(name="avgpool"),
        norm("norm_head"),
        Flatten(name="flatten"),
        Linear(name="fc"),
    ]


def vit(patch: int, scaled: bool) -> list[Layer]:
    """Return a small vision transformer: 12 blocks of width 384 with 6 heads, LayerNorm before each half.

    ``patch``: side of the squares that become tokens, in pixels; ``scaled``: with layer scale, as in DINOv2.
    """
    width, scale = 384, (Scale(name="scale"),) if scaled else ()
    layers: list[Layer] = [
        Conv(name="patches", channels=width, kernel=patch, stride=patch),
        Tokens(name="tokens"),
        ClassToken(name="class"),
        Positions(name="positions"),
    ]
    for number in range(1, 13):
        attention = (LayerNorm(name="norm", eps=1e-6), Attention(name="attention", heads=6), *scale)
        mlp = (
            LayerNorm(name="norm", eps=1e-6),
            Linear(name="fc1", features=4 * width),
            Gelu(name="gelu"),
            Linear(name="fc2", features=width),
            *scale,
        )
        halves = (ResidualBlock(name="attend", body=attention), ResidualBlock(name="mlp", body=mlp))
        layers.append(Block(name=f"block{number}", body=halves))
    return [*layers, LayerNorm(name="norm", eps=1e-6), FirstToken(name="first"), Linear(name="fc")]


# --- the names of their weights -----------------------------------------------------------------------------

Rules = tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...]
"""Patterns for the name of a layer or a weight in a file, and its name here; the first that fits is taken.

Names here leave out the part ``body`` of a block.
"""


def _timm_mobile(before: Sequence[int]) -> Rules:
    """Return timm's names of a mobile network.

    ``before``: the number of blocks before each of its groups; blocks here are numbered through, from 1.
    """

    def block(m: re.Match[str]) -> str:
        # The first group has no expansion, and its layers have the names of other layers elsewhere.
        """Return the name here of a layer in one of timm's blocks."""
        usual = {
            "conv_pw": "expand",
            "bn1": "bn0",
            "bn2": "bn1",
            "bn3": "bn2",
            "conv_pwl": "project",
        }
        parts = {"conv_pw": "project"} if m[1] == "0" else usual
        part = "depthwise" if m[3] == "conv_dw" else parts.get(m[3], m[3])
        return f"block{before[int(m[1])] + int(m[2]) + 1}.{part}"

    return (
        (r"blocks\.(\d)\.(\d)\.(\w+)", block),
        (r"bn1", "bn_stem"),
        (r"bn2", "bn_head"),
        (r"classifier", "fc"),
    )


def _torchvision_mobile(m: re.Match[str]) -> str:
    """Return the name here of a layer of torchvision's MobileNetV2, by its block and its place inside."""
    parts = ["expand", "bn0", "depthwise", "bn1", "project", "bn2"]
    places = {"0.0": 0, "0.1": 1, "1.0": 2, "1.1": 3, "2": 4, "3": 5}
    if m[1] == "1":  # no expansion
        places = {"0.0": 2, "0.1": 3, "1": 4, "2": 5}
    return f"block{m[1]}.{parts[places[m[2]]]}"


def _resnet_block(m: re.Match[str]) -> str:
    """Return the name here of the usual ``layer<group>.<number>``, whose numbers begin at 0."""
    return f"block{m[1]}_{int(m[2]) + 1}"


# torchvision's and timm's names of residual networks are the same.
RESNET: Rules = (
    (r"layer(\d)\.(\d)\.(conv\d|bn\d)", lambda m: f"{_resnet_block(m)}.sum.{m[3]}"),
    (r"layer(\d)\.(\d)\.downsample\.0", lambda m: f"{_resnet_block(m)}.sum.shortcut.conv"),
    (r"layer(\d)\.(\d)\.downsample\.1", lambda m: f"{_resnet_block(m)}.sum.shortcut.bn"),
)
# torchvision numbers the layers of a block, timm names them.
_CONVNEXT = {"0": "depthwise", "2": "norm", "3": "fc1", "5": "fc2", "conv_dw": "depthwise"}
# timm's names, which the published weights of DINOv2 have too.
VIT: Rules = (
    (r"cls_token", "class.weight"),
    (r"pos_embed", "positions.weight"),
    (r"patch_embed\.proj", "patches"),
    (r"blocks\.(\d+)\.norm1", lambda m: f"block{int(m[1]) + 1}.attend.norm"),
    (r"blocks\.(\d+)\.attn\.(\w+)", lambda m: f"block{int(m[1]) + 1}.attend.attention.{m[2]}"),
    (r"blocks\.(\d+)\.ls1\.gamma", lambda m: f"block{int(m[1]) + 1}.attend.scale.weight"),
    (r"blocks\.(\d+)\.norm2", lambda m: f"block{int(m[1]) + 1}.mlp.norm"),
    (r"blocks\.(\d+)\.mlp\.(\w+)", lambda m: f"block{int(m[1]) + 1}.mlp.{m[2]}"),
    (r"blocks\.(\d+)\.ls2\.gamma", lambda m: f"block{int(m[1]) + 1}.mlp.scale.weight"),
    (r"head", "fc"),
)
WEIGHT_NAMES: dict[str, Rules] = {
    "mobilenet-v2": (
        (r"features\.0\.0", "conv_stem"),
        (r"features\.0\.1", "bn_stem"),
        (r"features\.18\.0", "conv_head"),
        (r"features\.18\.1", "bn_head"),
        (r"features\.(\d+)\.conv\.([\d.]+)", _torchvision_mobile),
        (r"classifier\.1", "fc"),
        *_timm_mobile((0, 1, 3, 6, 10, 13, 16)),
    ),
    "efficientnet-lite0": (
        (r"_blocks\.(\d+)\._(\w+?)(_conv)?", lambda m: f"block{int(m[1]) + 1}.{m[2]}"),
        (r"_bn0", "bn_stem"),
        (r"_bn1", "bn_head"),
        (r"_(conv_stem|conv_head|fc)", r"\1"),
        *_timm_mobile((0, 1, 3, 5, 8, 11, 15)),
    ),
    "resnet18": (
        (r"layer(\d)\.(\d)\.(conv\d|bn\d)", lambda m: f"{_resnet_block(m)}.{m[3]}"),
        (r"layer(\d)\.(\d)\.downsample\.0", lambda m: f"{_resnet_block(m)}.shortcut.conv"),
        (r"layer(\d)\.(\d)\.downsample\.1", lambda m: f"{_resnet_block(m)}.shortcut.bn"),
    ),
    "resnet18-imagenet": RESNET,
    "resnet50": RESNET,
    # Of the usual PyTorch code; neither timm nor torchvision has this network.
    "wrn-28-2": (
        (r"block(\d)\.layer\.0\.bn1", r"bn\1"),
        (r"block(\d)\.layer\.(\d)\.convShortcut", lambda m: f"{_resnet_block(m)}.shortcut.conv"),
        (r"block(\d)\.layer\.(\d)\.(conv\d|bn\d)", lambda m: f"{_resnet_block(m)}.{m[3]}"),
        (r"bn1", "bn4"),
    ),
    "convnext-tiny": (
        (r"(?:stem|features\.0)\.0", "conv_stem"),
        (r"(?:stem|features\.0)\.1", "norm_stem"),
        (
            r"features\.([1357])\.(\d+)\.block\.(\d)",
            lambda m: f"block{(int(m[1]) + 1) // 2}_{int(m[2]) + 1}.{_CONVNEXT[m[3]]}",
        ),
        (
            r"features\.([1357])\.(\d+)\.layer_scale",
            lambda m: f"block{(int(m[1]) + 1) // 2}_{int(m[2]) + 1}.scale.weight",
        ),
        (r"features\.([246])\.0", lambda m: f"norm{int(m[1]) // 2 + 1}"),
        (r"features\.([246])\.1", lambda m: f"down{int(m[1]) // 2 + 1}"),
        (r"stages\.(\d)\.blocks\.(\d+)\.gamma", lambda m: f"{_stage(m)}.scale.weight"),
        (
            r"stages\.(\d)\.blocks\.(\d+)\.(?:mlp\.)?(\w+)",
            lambda m: f"{_stage(m)}.{_CONVNEXT.get(m[3], m[3])}",
        ),
        (r"stages\.(\d)\.downsample\.0", lambda m: f"norm{int(m[1]) + 1}"),
        (r"stages\.(\d)\.downsample\.1", lambda m: f"down{int(m[1]) + 1}"),
        (r"classifier\.0|head\.norm", "norm_head"),
        (r"classifier\.2|head\.fc", "fc"),
    ),
    "vit-small-16": VIT,
    "vit-small-14": VIT,
}
"""By model: the names that torchvision, timm or the network's first code give the weights."""


def _stage(m: re.Match[str]) -> str:
    """Return the name here of timm's ``stages.<group>.blocks.<number>``, whose numbers begin at 0."""
    return f"block{int(m[1]) + 1}_{int(m[2]) + 1}"
