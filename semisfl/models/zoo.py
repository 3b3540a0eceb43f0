"""The models known by name, as layer tables: the paper's four, and others that the field compares with.

Names of layers are those by which a model is cut (``model.cut = "relu2"``) and by which checkpoints hold weights:
to rename one makes older files unreadable.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from semisfl.models import backbones
from semisfl.models.backbones import conv
from semisfl.models.shapes import Shape
from semisfl.settings.layer_kinds import (
    AveragePool,
    BatchNorm,
    Conv,
    Drop,
    Flatten,
    Layer,
    Linear,
    Pool,
    Relu,
    ResidualBlock,
    name_layers,
    store_statistics,
)
from semisfl.settings.run import ModelConfig


def cnn() -> list[Layer]:
    """Return the paper's CNN: two convolutions and two linear layers."""
    layers: list[Layer] = []
    for number, width in enumerate((32, 64), start=1):
        layers += [
            Conv(name=f"conv{number}", channels=width, kernel=5),
            Relu(name=f"relu{number}"),
            Pool(name=f"pool{number}"),
        ]
    layers += [
        Flatten(name="flatten"),
        Linear(name="fc1", features=512),
        Relu(name="relu_fc1"),
        Linear(name="fc2"),
    ]
    return layers


def alexnet(kernels: tuple[int, ...] = (3, 3, 3, 3, 3)) -> list[Layer]:
    """Return the published code's AlexNet: five convolutions of width 64, 192, 384, 256, 256, and three linear layers.

    ``kernels``: the sides of the five kernels; paddings keep an image's size. The paper's text has three 3 x 3,
    one 7 x 7 and one 11 x 11 convolution, and names neither their order nor their widths: `alexnet-text` puts the
    largest first, as in Krizhevsky et al. 2012, and has the other layers of the published code, which the paper's
    preset uses.
    """
    layers: list[Layer] = []
    for number, (width, kernel) in enumerate(
        zip((64, 192, 384, 256, 256), kernels, strict=True), start=1
    ):
        layers += [Conv(name=f"conv{number}", channels=width, kernel=kernel, padding=kernel // 2)]
        layers += [Relu(name=f"relu{number}")]
        if number in (1, 2, 5):
            layers += [Pool(name=f"pool{number}")]
    layers += [
        Flatten(name="flatten"),
        Drop(name="drop1"),
        Linear(name="fc1", features=4096),
        Relu(name="relu_fc1"),
        Drop(name="drop2"),
        Linear(name="fc2", features=4096),
        Relu(name="relu_fc2"),
        Linear(name="fc3"),
    ]
    return layers


def vgg(depths: tuple[int, ...]) -> list[Layer]:
    """Return Simonyan and Zisserman's VGG with BatchNorm: five blocks of ``depths`` convolutions, each followed by pooling."""
    layers: list[Layer] = []
    # One block per image size; its last pooling halves the size.
    for block, (width, depth) in enumerate(zip((64, 128, 256, 512, 512), depths, strict=True), 1):
        for number in range(1, depth + 1):
            layers += [
                Conv(name=f"conv{block}_{number}", channels=width, padding=1),
                BatchNorm(name=f"bn{block}_{number}"),
                Relu(name=f"relu{block}_{number}"),
            ]
        # The authors pad the fourth pooling by one pixel; their feature sizes follow from it.
        layers += [Pool(name=f"pool{block}", padding=1 if block == 4 else 0)]
    layers += [
        Flatten(name="flatten"),
        Linear(name="fc1", features=4096),
        Relu(name="relu_fc1"),
        Drop(name="drop1"),
        Linear(name="fc2", features=4096),
        Relu(name="relu_fc2"),
        Drop(name="drop2"),
        Linear(name="fc3"),
    ]
    return layers


def _head() -> list[Layer]:
    """Return the end of the residual networks: mean over the picture, then one linear layer."""
    return [AveragePool(name="avgpool"), Flatten(name="flatten"), Linear(name="fc")]


def resnet18() -> list[Layer]:
    """Return the network of He et al. 2016 in the form used for 32 x 32 pixels: a 3 x 3 stem, no pooling after it.

    Four groups of two blocks; the first block of a group halves the picture and doubles the width.
    """
    layers: list[Layer] = [conv("conv1", 64, 3), BatchNorm(name="bn1"), Relu(name="relu1")]
    for group, width in enumerate((64, 128, 256, 512), start=1):
        for number in (1, 2):
            stride = 2 if group > 1 and number == 1 else 1
            block = ResidualBlock(
                name=f"block{group}_{number}",
                body=(
                    conv("conv1", width, 3, stride),
                    BatchNorm(name="bn1"),
                    Relu(name="relu1"),
                    conv("conv2", width, 3),
                    BatchNorm(name="bn2"),
                ),
                shortcut=(conv("conv", width, 1, stride), BatchNorm(name="bn"))
                if stride > 1
                else (),
            )
            layers += [block, Relu(name=f"relu{group}_{number}")]
    return [*layers, *_head()]


def wrn_28_2() -> list[Layer]:
    """Return the network of Zagoruyko and Komodakis 2016: BatchNorm and ReLU before each convolution, four blocks per group.

    A group's first block changes the width; there the shortcut too starts after BatchNorm and ReLU. Depth 28 counts the
    convolutions and the linear layer; width 2 doubles the 16, 32 and 64 channels of the usual network.
    """
    layers: list[Layer] = [conv("conv1", 16, 3)]
    for group, width in enumerate((32, 64, 128), start=1):
        stride = 1 if group == 1 else 2
        before: list[Layer] = [BatchNorm(name="bn1"), Relu(name="relu1")]
        after = [BatchNorm(name="bn2"), Relu(name="relu2"), conv("conv2", width, 3)]
        layers += [
            BatchNorm(name=f"bn{group}"),
            Relu(name=f"relu{group}"),
            ResidualBlock(
                name=f"block{group}_1",
                body=(conv("conv1", width, 3, stride), *after),
                shortcut=(conv("conv", width, 1, stride),),
            ),
        ]
        layers += [
            ResidualBlock(
                name=f"block{group}_{number}", body=(*before, conv("conv1", width, 3), *after)
            )
            for number in (2, 3, 4)
        ]
    return [*layers, BatchNorm(name="bn4"), Relu(name="relu4"), *_head()]


class NamedModel(NamedTuple):
    """A model with a name: the function that makes its table, and the input that its published counts are for."""

    table: Callable[[], list[Layer]]
    shape: Shape = (3, 32, 32)
    """Channels, height and width. The projection head has its published width at this shape alone."""
    classes: int = 10


IMAGENET: Shape = (3, 224, 224)
# The paper's four with the text's AlexNet, two that the field compares with, and those whose trained weights are
# shared. An entry here needs its name in `semisfl.settings.catalog.MODELS`, which loads no torch.
MODELS: dict[str, NamedModel] = {
    "cnn": NamedModel(cnn),
    "alexnet": NamedModel(alexnet),
    "alexnet-text": NamedModel(partial(alexnet, (11, 7, 3, 3, 3))),
    "vgg13": NamedModel(partial(vgg, (2, 2, 2, 2, 2)), (3, 96, 96)),
    "vgg16": NamedModel(partial(vgg, (2, 2, 3, 3, 3)), (3, 144, 144), 100),
    "resnet18": NamedModel(resnet18),
    "wrn-28-2": NamedModel(wrn_28_2),
    "mobilenet-v2": NamedModel(
        partial(backbones.mobile, backbones.MOBILENET_V2, same=False, eps=1e-5), IMAGENET, 1000
    ),
    "efficientnet-lite0": NamedModel(
        partial(backbones.mobile, backbones.EFFICIENTNET_LITE0, same=True, eps=1e-3), IMAGENET, 1000
    ),
    "resnet18-imagenet": NamedModel(
        partial(backbones.resnet, (2, 2, 2, 2), bottleneck=False), IMAGENET, 1000
    ),
    "resnet50": NamedModel(
        partial(backbones.resnet, (3, 4, 6, 3), bottleneck=True), IMAGENET, 1000
    ),
    "convnext-tiny": NamedModel(backbones.convnext_tiny, IMAGENET, 1000),
    # ViT-S of Dosovitskiy et al. 2021 in the size of Touvron et al. 2021, and with layer scale as in DINOv2 (Oquab et al.
    # 2023).
    "vit-small-16": NamedModel(partial(backbones.vit, 16, scaled=False), IMAGENET, 1000),
    "vit-small-14": NamedModel(partial(backbones.vit, 14, scaled=True), (3, 518, 518), 1000),
}


def layers_by_cut(
    model: ModelConfig, *, whole: bool = True
) -> tuple[list[tuple[str, Layer]], int | str | None]:
    """Return every layer with its name, or only the bottom's, and how many of them are the bottom's.

    A cut that does not fit is returned as it is: building the model reports it. Raises `ConfigError` for code, unless
    it is the top that is code and only the bottom is asked for.
    """
    table = model.table if whole or model.layers is None else model.layers
    layers = name_layers(MODELS[table].table() if isinstance(table, str) else table)
    if model.weights is not None:
        layers = [(name, store_statistics(layer)) for name, layer in layers]
    names = [name for name, _ in layers]
    flat = [index for index, (_, layer) in enumerate(layers) if isinstance(layer, Flatten)]
    cut = model.cut
    if cut in names:
        cut = names.index(str(cut)) + 1
    elif cut is None and flat:
        cut = flat[0] + 1
    return layers if whole or not isinstance(cut, int) else layers[:cut], cut
