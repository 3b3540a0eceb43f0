"""The models known by name, as layer tables: the paper's four, and others that the field compares with.

Names of layers are those by which a model is cut (``model.cut = "relu2"``) and by which checkpoints hold weights:
to rename one makes older files unreadable.
"""

from collections.abc import Callable
from typing import NamedTuple

from semisfl.models import backbones
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

    ``kernels``: the sides of the five kernels; paddings keep an image's size.
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


def alexnet_text() -> list[Layer]:
    """Return the AlexNet of the paper's text: three 3 x 3, one 7 x 7 and one 11 x 11 convolution.

    The text names neither their order nor their widths. Here the largest kernel is first, as in Krizhevsky
    et al. 2012, and widths, pooling and linear layers are those of the published code, whose five
    convolutions are 3 x 3: `alexnet`, which the paper's preset uses.
    """
    return alexnet((11, 7, 3, 3, 3))


def _vgg(depths: tuple[int, ...]) -> list[Layer]:
    """Return a VGG with BatchNorm: five blocks of ``depths`` convolutions, each followed by pooling."""
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


def vgg13() -> list[Layer]:
    """Return Simonyan and Zisserman's VGG13 with BatchNorm: ten convolutions."""
    return _vgg((2, 2, 2, 2, 2))


def vgg16() -> list[Layer]:
    """Return Simonyan and Zisserman's VGG16 with BatchNorm: thirteen convolutions."""
    return _vgg((2, 2, 3, 3, 3))


def _conv3(number: int, width: int, stride: int = 1) -> Conv:
    """Return a 3 x 3 convolution without bias, as BatchNorm follows or precedes it."""
    return Conv(name=f"conv{number}", channels=width, stride=stride, padding=1, bias=False)


def _conv1(width: int, stride: int) -> Conv:
    """Return the 1 x 1 convolution of a shortcut that changes width or size."""
    return Conv(name="conv", channels=width, kernel=1, stride=stride, bias=False)


def _head() -> list[Layer]:
    """Return the end of the residual networks: mean over the picture, then one linear layer."""
    return [AveragePool(name="avgpool"), Flatten(name="flatten"), Linear(name="fc")]


def resnet18() -> list[Layer]:
    """Return the network of He et al. 2016 in the form used for 32 x 32 pixels: a 3 x 3 stem, no pooling after it.

    Four groups of two blocks; the first block of a group halves the picture and doubles the width.
    """
    layers: list[Layer] = [_conv3(1, 64), BatchNorm(name="bn1"), Relu(name="relu1")]
    for group, width in enumerate((64, 128, 256, 512), start=1):
        for number in (1, 2):
            stride = 2 if group > 1 and number == 1 else 1
            block = ResidualBlock(
                name=f"block{group}_{number}",
                body=(
                    _conv3(1, width, stride),
                    BatchNorm(name="bn1"),
                    Relu(name="relu1"),
                    _conv3(2, width),
                    BatchNorm(name="bn2"),
                ),
                shortcut=(_conv1(width, stride), BatchNorm(name="bn")) if stride > 1 else (),
            )
            layers += [block, Relu(name=f"relu{group}_{number}")]
    return [*layers, *_head()]


def wrn_28_2() -> list[Layer]:
    """Return the network of Zagoruyko and Komodakis 2016: BatchNorm and ReLU before each convolution, four blocks per group.

    A group's first block changes the width; there the shortcut too starts after BatchNorm and ReLU. Depth 28 counts the
    convolutions and the linear layer; width 2 doubles the 16, 32 and 64 channels of the usual network.
    """
    layers: list[Layer] = [_conv3(1, 16)]
    for group, width in enumerate((32, 64, 128), start=1):
        stride = 1 if group == 1 else 2
        before: list[Layer] = [BatchNorm(name="bn1"), Relu(name="relu1")]
        after = [BatchNorm(name="bn2"), Relu(name="relu2"), _conv3(2, width)]
        layers += [
            BatchNorm(name=f"bn{group}"),
            Relu(name=f"relu{group}"),
            ResidualBlock(
                name=f"block{group}_1",
                body=(_conv3(1, width, stride), *after),
                shortcut=(_conv1(width, stride),),
            ),
        ]
        layers += [
            ResidualBlock(name=f"block{group}_{number}", body=(*before, _conv3(1, width), *after))
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
    "alexnet-text": NamedModel(alexnet_text),
    "vgg13": NamedModel(vgg13, (3, 96, 96)),
    "vgg16": NamedModel(vgg16, (3, 144, 144), 100),
    "resnet18": NamedModel(resnet18),
    "wrn-28-2": NamedModel(wrn_28_2),
    "mobilenet-v2": NamedModel(backbones.mobilenet_v2, IMAGENET, 1000),
    "efficientnet-lite0": NamedModel(backbones.efficientnet_lite0, IMAGENET, 1000),
    "resnet18-imagenet": NamedModel(backbones.resnet18_imagenet, IMAGENET, 1000),
    "resnet50": NamedModel(backbones.resnet50, IMAGENET, 1000),
    "convnext-tiny": NamedModel(backbones.convnext_tiny, IMAGENET, 1000),
    "vit-small-16": NamedModel(backbones.vit_small_16, IMAGENET, 1000),
    "vit-small-14": NamedModel(backbones.vit_small_14, (3, 518, 518), 1000),
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
