"""Models as plain layer tables, and the cut that gives clients the bottom and the server the rest."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semisfl.layers import Dropout, Layers

Shape = tuple[int, int, int]
# The published projection head is as wide as its input, which is 12,800 at most in the paper. An
# early cut gives far longer features, and that head would not fit in memory: it is narrower then.
WIDEST_HEAD, NARROW_HEAD = 12_800, 2_048
Projector = Literal["mlp", "linear", "none"]


def _stack(layers: list[tuple[str, nn.Module]]) -> nn.Sequential:
    return Layers(OrderedDict(layers))


def _flat_size(layers: list[tuple[str, nn.Module]], shape: Shape) -> int:
    return int(feature_shape(_stack(layers), shape)[0])


def feature_shape(module: nn.Module, shape: Shape) -> tuple[int, ...]:
    """The shape of one image's output, found by passing zeros through."""
    mode = module.training
    module.eval()
    with torch.no_grad():
        out = module(torch.zeros(1, *shape))
    module.train(mode)
    return tuple(out.shape[1:])


def cnn(shape: Shape, classes: int) -> nn.Sequential:
    layers: list[tuple[str, nn.Module]] = []
    channels = shape[0]
    for number, width in enumerate((32, 64), start=1):
        layers += [
            (f"conv{number}", nn.Conv2d(channels, width, 5)),
            (f"relu{number}", nn.ReLU()),
            (f"pool{number}", nn.MaxPool2d(2)),
        ]
        channels = width
    layers.append(("flatten", nn.Flatten()))
    size = _flat_size(layers, shape)
    layers += [
        ("fc1", nn.Linear(size, 512)),
        ("relu_fc1", nn.ReLU()),
        ("fc2", nn.Linear(512, classes)),
    ]
    return _stack(layers)


def alexnet(shape: Shape, classes: int) -> nn.Sequential:
    layers: list[tuple[str, nn.Module]] = []
    channels = shape[0]
    for number, width in enumerate((64, 192, 384, 256, 256), start=1):
        layers += [
            (f"conv{number}", nn.Conv2d(channels, width, 3, padding=1)),
            (f"relu{number}", nn.ReLU()),
        ]
        if number in (1, 2, 5):
            layers.append((f"pool{number}", nn.MaxPool2d(2)))
        channels = width
    layers.append(("flatten", nn.Flatten()))
    size = _flat_size(layers, shape)
    layers += [
        ("drop1", Dropout()),
        ("fc1", nn.Linear(size, 4096)),
        ("relu_fc1", nn.ReLU()),
        ("drop2", Dropout()),
        ("fc2", nn.Linear(4096, 4096)),
        ("relu_fc2", nn.ReLU()),
        ("fc3", nn.Linear(4096, classes)),
    ]
    return _stack(layers)


def _vgg(depths: tuple[int, ...]) -> Callable[[Shape, int], nn.Sequential]:
    def build(shape: Shape, classes: int) -> nn.Sequential:
        layers: list[tuple[str, nn.Module]] = []
        channels = shape[0]
        for block, (width, depth) in enumerate(
            zip((64, 128, 256, 512, 512), depths, strict=True), 1
        ):
            for number in range(1, depth + 1):
                layers += [
                    (f"conv{block}_{number}", nn.Conv2d(channels, width, 3, padding=1)),
                    (f"bn{block}_{number}", nn.BatchNorm2d(width)),
                    (f"relu{block}_{number}", nn.ReLU()),
                ]
                channels = width
            # The authors pad the fourth pooling by one pixel; their feature sizes follow from it.
            layers.append((f"pool{block}", nn.MaxPool2d(2, padding=1 if block == 4 else 0)))
        layers.append(("flatten", nn.Flatten()))
        size = _flat_size(layers, shape)
        layers += [
            ("fc1", nn.Linear(size, 4096)),
            ("relu_fc1", nn.ReLU()),
            ("drop1", Dropout()),
            ("fc2", nn.Linear(4096, 4096)),
            ("relu_fc2", nn.ReLU()),
            ("drop2", Dropout()),
            ("fc3", nn.Linear(4096, classes)),
        ]
        return _stack(layers)

    return build


MODELS: dict[str, Callable[[Shape, int], nn.Sequential]] = {
    "cnn": cnn,
    "alexnet": alexnet,
    "vgg13": _vgg((2, 2, 2, 2, 2)),
    "vgg16": _vgg((2, 2, 3, 3, 3)),
}


class SplitModel(nn.Module):
    """A model cut in two, with a projection head beside the top: w = (w_c, w_s, w_p).

    ``bottom`` maps images to flat features [n, d]; ``top`` maps them to logits; ``projector``
    to the space in which clusters are formed.
    """

    def __init__(
        self, bottom: nn.Module, top: nn.Module, projector: nn.Module, features: int
    ) -> None:
        super().__init__()
        self.bottom = bottom
        self.top = top
        self.projector = projector
        self.features = features

    def forward(self, x: Tensor) -> Tensor:
        return self.top(self.bottom(x))

    def project(self, features: Tensor) -> Tensor:
        """Unit vectors z of Eq. (3)."""
        return F.normalize(self.projector(features).float(), dim=1)

    @property
    def keys(self) -> int:
        """Length of a projected feature."""
        widths = [
            layer.out_features for layer in self.projector.modules() if isinstance(layer, nn.Linear)
        ]
        return widths[-1] if widths else self.features


def split(
    model: nn.Sequential,
    shape: Shape,
    cut: int | str | None = None,
    projector: Projector = "mlp",
    projection: int = 128,
) -> SplitModel:
    """Cut any ``nn.Sequential``.

    ``cut``: how many layers the client holds, or the name of its last layer; None: everything up
    to the first ``Flatten``. Layers are moved, not copied. Plain ``nn.Dropout`` is replaced by
    the repeatable one.
    """
    _adopt_dropout(model)
    layers = list(model.named_children())
    at = _cut_index(layers, cut)
    bottom = _stack([*layers[:at]])
    if not any(True for _ in bottom.parameters()):
        raise ValueError(
            f"model.cut = {cut!r} leaves the clients no parameters; cut after a convolution"
        )
    if not any(True for _, layer in layers[at:] for _ in layer.parameters()):
        raise ValueError(
            f"model.cut = {cut!r} leaves the server no parameters; cut before the last linear layer"
        )
    cut_shape = feature_shape(bottom, shape)
    if len(cut_shape) > 1:
        bottom = _stack([*layers[:at], (_unused("cut", layers), nn.Flatten())])
        top = _stack([(_unused("uncut", layers), nn.Unflatten(1, cut_shape)), *layers[at:]])
    else:
        top = _stack(layers[at:])
    size = 1
    for side in cut_shape:
        size *= side
    hidden = size if size <= WIDEST_HEAD else NARROW_HEAD
    heads: dict[str, Callable[[], nn.Module]] = {
        "mlp": lambda: nn.Sequential(
            nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, projection)
        ),
        "linear": lambda: nn.Linear(size, projection),
        "none": nn.Identity,
    }
    return SplitModel(bottom, top, heads[projector](), size)


def build(
    name: str,
    shape: Shape,
    classes: int,
    *,
    cut: int | str | None = None,
    projector: Projector = "mlp",
    projection: int = 128,
    seed: int = 0,
) -> SplitModel:
    """A named model, cut; its initial weights follow from ``seed``."""
    if name not in MODELS:
        raise ValueError(f"model.name = {name!r} is not known; known: {', '.join(MODELS)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            whole = MODELS[name](shape, classes)
        except RuntimeError as error:
            raise ValueError(
                f"model.name = {name!r} cannot take images of {shape[1]}x{shape[2]} pixels; "
                "set data.size to a larger side or choose another model"
            ) from error
        return split(whole, shape, cut, projector, projection)


def _unused(name: str, layers: list[tuple[str, nn.Module]]) -> str:
    """``name``, or one like it that no layer has."""
    while any(name == taken for taken, _ in layers):
        name += "_"
    return name


def _cut_index(layers: list[tuple[str, nn.Module]], cut: int | str | None) -> int:
    names = [name for name, _ in layers]
    if cut is None:
        flat = [index for index, (_, layer) in enumerate(layers) if isinstance(layer, nn.Flatten)]
        if not flat or flat[0] + 1 >= len(layers):
            raise ValueError(
                "model.cut is not given and the model has no Flatten layer to cut at; set it"
            )
        return flat[0] + 1
    if isinstance(cut, str):
        if cut not in names:
            raise ValueError(
                f"model.cut = {cut!r} is no layer of the model; its layers: {', '.join(names)}"
            )
        cut = names.index(cut) + 1
    if not 1 <= cut <= len(layers) - 1:
        raise ValueError(
            f"model.cut = {cut} is outside the model; it has {len(layers)} layers, use 1 to {len(layers) - 1}"
        )
    return cut


def _adopt_dropout(module: nn.Module) -> None:
    for name, child in module.named_children():
        if type(child) is nn.Dropout:
            setattr(module, name, Dropout(child.p))
        else:
            _adopt_dropout(child)


def parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
