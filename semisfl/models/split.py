"""Cut a model in two: clients hold the bottom, the server the top and a projection head.

``bottom`` always returns flat features, which are what is sent: where the cut lies before a flatten, one is added
behind the bottom and undone in front of the top.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from math import prod
from typing import Literal

from torch import Tensor, nn

from semisfl.engine.kernels import unit_rows
from semisfl.models.layers import Layers, adopt_layers, keep_inputs, named_layers
from semisfl.models.own import feature_shape
from semisfl.models.shapes import Shape, Sides
from semisfl.settings.counts import plural

log = logging.getLogger(__name__)

# The published projection head is as wide as its input, which is 12,800 at most in the paper. Elsewhere
# such a head would take most of the memory: 10,816 x 10,816 for a CNN at 64 pixels. It is narrower there.
WIDEST_HEAD, NARROW_HEAD = 12_800, 2_048
Projector = Literal["mlp", "linear", "none"]


def _stack(layers: list[tuple[str, nn.Module]]) -> nn.Sequential:
    """Return layers with these names as one sequence that fuses them."""
    return Layers(OrderedDict(layers))


class SplitModel(nn.Module):
    """A model cut in two, with a projection head beside the top: w = (w_c, w_s, w_p).

    ``bottom`` maps images [n, C, H, W] to features [n, d]; ``top`` maps them to logits [n, classes]; ``projector``
    to the space in which clusters are formed. ``features`` is d.

    ``embedded``: the projection head reads what the top's last layer reads, in place of the features. A bottom that
    never changes needs that: clusters of its features teach nothing.
    """

    def __init__(
        self,
        bottom: nn.Module,
        top: nn.Sequential,
        projector: nn.Module,
        features: int,
        embedded: bool = False,
    ) -> None:
        super().__init__()
        self.bottom = bottom
        self.top = top
        self.projector = projector
        self.features = features
        self.embedded = embedded

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [n, classes] of images."""
        return self.top(self.bottom(x))

    def whole(self) -> nn.Sequential:
        """Return bottom and top without the head: the model that full-model methods train, send and test."""
        return nn.Sequential(OrderedDict(bottom=self.bottom, top=self.top))

    def project(self, features: Tensor) -> Tensor:
        """Return the unit vectors z of Eq. (3), [n, keys], for features [n, d]."""
        return unit_rows(self.projector(self._trunk(features) if self.embedded else features))

    def outputs(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [n, classes] and the unit vectors z [n, keys] for features [n, d]."""
        if not self.embedded:
            return self.top(features), self.project(features)
        embedding = self._trunk(features)
        return self.top[-1](embedding), unit_rows(self.projector(embedding))

    def _trunk(self, features: Tensor) -> Tensor:
        """Return the input of the top's last layer, [n, width]."""
        return self.top[:-1](features)

    @property
    def keys(self) -> int:
        """Return the length of a projected feature, which is that of a queue's keys."""
        widths = [
            layer.out_features for layer in self.projector.modules() if isinstance(layer, nn.Linear)
        ]
        if widths:
            return widths[-1]
        last = self.top[-1]
        return last.in_features if self.embedded and isinstance(last, nn.Linear) else self.features


def split(
    model: nn.Sequential,
    shape: Shape,
    cut: int | str | None = None,
    projector: Projector = "mlp",
    projection: int = 128,
    widest: int = NARROW_HEAD,
    outputs: Sequence[Sides] = (),
    embedded: bool = False,
) -> SplitModel:
    """Cut any ``nn.Sequential``; its layers are moved, not copied.

    A plain ``nn.Dropout`` is replaced by the one of `layers`, and no layer works in place afterwards.

    Args:
        model: the layers in order.
        shape: channels, height and width of an image.
        cut: how many layers the clients hold, or the name of their last layer; None: everything up to the first
            ``Flatten``.
        projector: the kind of the projection head.
        projection: the length of a projected feature.
        widest: most features for which the head of kind mlp is as wide as its input.
        outputs: the shape of each layer's output, if it is known; else zeros are passed through.
        embedded: see `SplitModel`; it needs a network that ends with a linear layer.

    Raises ValueError if the cut lies outside the model, leaves one side without parameters, or goes through a
    parameter that both sides use.
    """
    adopt_layers(model)
    # Top and head both read the features, and a fused ReLU's output is needed for its gradient.
    keep_inputs(model)
    layers = named_layers(model)
    at = cut_index(layers, cut)
    bottom = _stack(layers[:at])
    rest = nn.ModuleList(layer for _, layer in layers[at:])
    for part, holder in ((bottom, "clients"), (rest, "server")):
        if not parameter_count(part):
            raise ValueError(
                f"a cut after {layers[at - 1][0]!r} leaves the {holder} no parameters; set model.cut to another layer"
            )
    _refuse_shared(bottom, rest)
    cut_shape = outputs[at - 1] if outputs else feature_shape(bottom, shape)
    bottom, top = flat(bottom, cut_shape), _stack(layers[at:])
    if len(cut_shape) > 1:
        top = _stack([(free_name("uncut", layers), nn.Unflatten(1, cut_shape)), *layers[at:]])
    size = read = prod(cut_shape)
    last = layers[-1][1]
    if embedded and isinstance(last, nn.Linear):
        read = last.in_features
    elif embedded:
        embedded = False
        log.warning(
            "the network ends with a %s, so clustering does not teach the layers above a frozen bottom: the projection "
            "head reads the bottom's features; end the network with an nn.Linear",
            type(last).__name__,
        )
    hidden = read if read <= widest else NARROW_HEAD
    heads: dict[str, Callable[[], nn.Module]] = {
        "mlp": lambda: Layers(nn.Linear(read, hidden), nn.ReLU(), nn.Linear(hidden, projection)),
        "linear": lambda: nn.Linear(read, projection),
        "none": nn.Identity,
    }
    return SplitModel(bottom, top, heads[projector](), size, embedded)


def flat(bottom: nn.Sequential, sides: Sides) -> nn.Sequential:
    """Return a bottom whose output has the shape ``sides`` so that it gives flat features."""
    if len(sides) == 1:
        return bottom
    layers = named_layers(bottom)
    return _stack([*layers, (free_name("cut", layers), nn.Flatten())])


def _refuse_shared(bottom: nn.Module, rest: nn.Module) -> None:
    """Raise ValueError for a parameter on both sides of the cut: each side would train its own copy."""
    above = set(map(id, rest.parameters()))
    for name, parameter in bottom.named_parameters():
        if id(parameter) in above:
            raise ValueError(
                f"parameter {name!r} is on both sides of the cut, and what the server learns of it would be lost; "
                "set model.cut so that one side has it, or give each side its own"
            )


def free_name(name: str, layers: list[tuple[str, nn.Module]]) -> str:
    """Return ``name``, or a similar name that no layer has."""
    while any(name == taken for taken, _ in layers):
        name += "_"
    return name


def cut_index(layers: list[tuple[str, nn.Module]], cut: int | str | None) -> int:
    """Return how many layers the clients hold; ``cut`` is what `split` takes."""
    names = [name for name, _ in layers]
    if cut is None:
        flat = [index for index, (_, layer) in enumerate(layers) if isinstance(layer, nn.Flatten)]
        if not flat or flat[0] + 1 >= len(layers):
            raise ValueError(
                "model.cut is not given and the model has no Flatten layer to cut at; set it"
            )
        return flat[0] + 1
    if isinstance(cut, str):
        if cut not in names[:-1]:
            raise ValueError(
                f"model.cut = {cut!r} is no layer that the model can be cut after; these are {', '.join(names[:-1])}"
            )
        cut = names.index(cut) + 1
    if not 1 <= cut <= len(layers) - 1:
        raise ValueError(
            f"model.cut = {cut} is outside the model; it has {plural(len(layers), 'layer')}, use 1 to {len(layers) - 1}"
        )
    return cut


def parameter_count(module: nn.Module) -> int:
    """Return the number of values of all parameters."""
    return sum(parameter.numel() for parameter in module.parameters())
