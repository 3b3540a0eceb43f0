"""Build the model of a configuration, by name, from a layer table or from a user's modules, and cut it.

Every machine of a run builds the same model: first weights are drawn from the run's seed, and nothing else of a
program's random numbers is touched.
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from typing import Any

from torch import nn

from semisfl import seeds
from semisfl.models.freezing import freeze
from semisfl.models.layers import Layers, named_layers
from semisfl.models.modules import layers_of, modules_of
from semisfl.models.own import Own, check_own, digest_of, global_seed, is_sequential
from semisfl.models.shapes import Shape, place
from semisfl.models.split import (
    NARROW_HEAD,
    WIDEST_HEAD,
    Projector,
    SplitModel,
    cut_index,
    flat,
    free_name,
    split,
)
from semisfl.models.zoo import MODELS, layers_by_cut
from semisfl.settings.config import Config, ConfigError
from semisfl.settings.layer_kinds import Layer, parse_layers
from semisfl.settings.run import CODE, ModelConfig

log = logging.getLogger(__name__)


def uncut(model: str | Sequence[Layer], shape: Shape, classes: int) -> Layers:
    """Return a model by its name or from a table, not yet cut, with PyTorch's initial weights.

    ``shape``: channels, height and width of an image. Raises ValueError if a layer does not fit its input.
    """
    if not isinstance(model, str):
        return modules_of(model, shape, classes)
    try:
        return modules_of(MODELS[model].table(), shape, classes)
    except ValueError as error:
        raise ValueError(
            f"model.name = {model!r} cannot take images of {shape[1]}x{shape[2]} pixels; "
            "choose another model or larger images (data.size resizes those of a named set or folder)"
        ) from error


def build(
    model: str | Sequence[Layer],
    shape: Shape,
    classes: int,
    *,
    cut: int | str | None = None,
    projector: Projector = "mlp",
    projection: int = 128,
    seed: int = 0,
    widest: int | None = None,
    embedded: bool = False,
) -> SplitModel:
    """Return a model by its name or table, cut; its initial weights follow from ``seed``.

    Args:
        model: a name in `zoo.MODELS`, or a table of layers.
        shape: channels, height and width of an image.
        classes: how many numbers the model returns for an image.
        cut: index or name of the last layer on the clients; None: everything up to the first ``Flatten``.
        projector: the kind of the projection head; ``none`` where only the bottom is needed.
        projection: the length of a projected feature.
        widest: most features for which the head is as wide as its input; None: as published (`widest_head`).
        embedded: the head reads what the last layer reads (`SplitModel`).

    Raises ValueError if a layer does not fit its input or the cut leaves one side without parameters.
    """
    with global_seed(seed):
        layers = uncut(model, shape, classes)
        table = MODELS[model].table() if isinstance(model, str) else model
        outputs = [layer.gives for layer in place(table, shape, classes)]
        head = widest or widest_head(model, shape)
        return split(layers, shape, cut, projector, projection, head, outputs, embedded)


def widest_head(model: str | Sequence[Layer], shape: Shape) -> int:
    """Return the most features d for which the head is as wide as its input.

    That is the paper's limit for a named model at the image size it was published for, and narrow elsewhere: a head
    of d x d weights would take most of the memory.
    """
    published = isinstance(model, str) and MODELS[model].shape == shape
    return WIDEST_HEAD if published else NARROW_HEAD


def build_model(
    config: Config,
    shape: Shape,
    classes: int,
    own: nn.Sequential | None = None,
    *,
    projector: Projector | None = None,
    widest: int | None = None,
) -> SplitModel:
    """Return the model of a configuration, or the ``own`` one, cut as configured; the same on every machine.

    With ``clients.bottom`` = "frozen" its bottom has no parameters (`semisfl.models.freezing`). ``projector`` replaces
    the configuration's: a client needs none. ``widest`` is what `build` takes: a resumed run keeps the head that it
    began with. Raises ValueError like `build`.
    """
    settings, frozen = config.model, config.clients.bottom == "frozen"
    projector = projector or settings.projector
    seed = seeds.derive(config.seed, "model")
    if own is None:
        model = build(
            settings.table,
            shape,
            classes,
            cut=settings.cut,
            projector=projector,
            projection=settings.projection,
            seed=seed,
            widest=widest,
            embedded=frozen,
        )
    else:
        with global_seed(seed):
            check_own(own, shape, classes)  # lazy layers draw their weights here
            model = split(
                own,
                shape,
                settings.cut,
                projector,
                settings.projection,
                widest or NARROW_HEAD,
                embedded=frozen,
            )
    model.bottom = freeze(model.bottom) if frozen else model.bottom
    return model


def build_bottom(config: Config, shape: Shape, classes: int) -> SplitModel:
    """Return the model of a device in a split method: its bottom, and no top. Raises ValueError like `build`."""
    table = [layer for _, layer in layers_by_cut(config.model, whole=False)[0]]
    bottom, features = bottom_of(table, shape, classes)
    bottom = freeze(bottom) if config.clients.bottom == "frozen" else bottom
    return SplitModel(bottom, Layers(), nn.Identity(), features)


def bottom_of(table: Sequence[Layer], shape: Shape, classes: int) -> tuple[nn.Sequential, int]:
    """Return the bottom whose layers are ``table``, for weights that a server sends, and the length of its features."""
    with global_seed(0):
        layers = modules_of(table, shape, classes, whole=False)
    sides = place(table, shape, classes, whole=False)[-1].gives
    return flat(layers, sides), prod(sides)


def with_top(
    table: Sequence[Layer], top: Own, shape: Shape, classes: int, seed: int = 0
) -> nn.Sequential:
    """Return a network of a bottom that a table describes and any module, which is given what the bottom gives.

    ``top``: a module, or its stages in order; a sequence's layers keep their names where the bottom has no such name.
    """
    with global_seed(seed):
        layers = named_layers(modules_of(table, shape, classes, whole=False))
    stages = top if isinstance(top, nn.Module) else nn.Sequential(*top)
    for name, stage in named_layers(stages) if is_sequential(stages) else [("top", stages)]:
        layers.append((free_name(name, layers), stage))
    return Layers(OrderedDict(layers))


def with_layers_of(config: Config, own: nn.Sequential) -> Config:
    """Return ``config`` with the ``own`` model as a table, so that others can build it again.

    A model that no table describes is called ``code-`` and a digest of its parts, and a resumed run needs it as an
    argument again. Where a table describes its bottom the configuration holds that one, which is all that the devices
    of a split method need.
    """
    described = {"layers": None, **_description(own, config.model.cut)}
    model = ModelConfig.model_validate({**config.model.model_dump(), **described})
    return config.model_copy(update={"model": model})


def _description(own: nn.Sequential, cut: int | str | None) -> dict[str, Any]:
    """Return the settings that describe a model: its layers, or a name with a digest of its code and the bottom's layers."""
    try:
        return {"layers": layers_of(own)}
    except ValueError as error:
        log.info("the configuration cannot hold the given model: %s", error)
    layers = named_layers(own)
    at = cut_index(layers, cut)
    with suppress(ValueError):
        bottom = layers_of(nn.Sequential(OrderedDict(layers[:at])))
        top = nn.Sequential(OrderedDict(layers[at:]))
        return {"name": f"{CODE}-{digest_of(top)}", "layers": bottom, "cut": at}
    return {"name": f"{CODE}-{digest_of(own)}"}


def check_same(
    own: nn.Sequential, name: str, table: Sequence[Layer] | None, cut: int | str | None
) -> None:
    """Raise `ConfigError` if ``own`` is not the network that was trained, by its ``name`` or ``table``.

    ``table``: of the whole network, or of the bottom where ``name`` says that its top is code. A warning names a
    module that may be another one: its code may have changed and compute the same.
    """
    now = _description(own, cut)
    if name in MODELS:
        table = MODELS[name].table()
    layers, code = now.get("layers"), now.get("name", "a table of layers")
    if name.startswith(CODE) != ("name" in now) or (name.startswith(CODE) and code != name):
        log.warning(
            "the module has other code or settings than the one that was trained (%s, now %s); unless it computes "
            "the same, the weights do not belong into it",
            name,
            code,
        )
    elif None not in (layers, table) and parse_layers(layers) != tuple(table or ()):
        raise ConfigError(
            "the module passed is not the network that was trained; give that one, or none if all of its layers are in a table"
        )
