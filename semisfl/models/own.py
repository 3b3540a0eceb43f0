"""Models that users write: any module that can be cut, as a sequence of stages.

Training cuts a sequence. So a user's module is taken apart into its children, and compared with them: a module
whose forward does more than call its children in order is refused, because training would compute another
function without saying so.
"""

import copy
import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from types import FunctionType

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from semisfl.models.layers import Layers, adopt_layers, named_layers, use_generator
from semisfl.models.shapes import Shape

Own = nn.Module | Sequence[nn.Module]
"""An ``nn.Sequential``, a module whose children are called in order, or a list of stages."""
_GLOBAL_NUMBERS = RLock()


def feature_shape(module: nn.Module, shape: Shape) -> tuple[int, ...]:
    """Return the shape of one image's output without the batch axis, by passing zeros through in eval mode.

    ``shape``: channels, height and width of an image.
    """
    mode = module.training
    module.eval()
    like = next(module.parameters(), torch.empty(0))
    with torch.no_grad():
        out = module(torch.zeros(1, *shape, dtype=like.dtype, device=like.device))
    module.train(mode)
    return tuple(out.shape[1:])


def is_sequential(model: Own) -> bool:
    """Return whether ``model`` is an ``nn.Sequential`` that only calls its layers in order."""
    plain = (nn.Sequential.forward, Layers.forward)
    return isinstance(model, nn.Sequential) and type(model).forward in plain


def stages_of(model: Own, shape: Shape) -> nn.Sequential:
    """Return ``model`` as a sequence of its own layers.

    A module is called and compared with its children in order, in eval and in train mode. A flatten that
    its forward has between a picture and its last linear layer is added. Raises ValueError if its children,
    called in order, are not the model, or if a layer has a forward hook, which training does not call.
    """
    stages: nn.Sequential
    if isinstance(model, nn.Sequential) and is_sequential(model):
        stages = model
    elif isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList):
        stages = _children_of(model, shape)
    else:
        stages = nn.Sequential(OrderedDict((f"stage{n}", one) for n, one in enumerate(model, 1)))
    for name, layer in stages.named_modules():
        lazy = isinstance(layer, nn.modules.lazy.LazyModuleMixin)  # its hook makes the weights
        if not lazy and (layer._forward_hooks or layer._forward_pre_hooks):
            raise ValueError(
                f"layer {name!r} ({type(layer).__name__}) has a forward hook, which training does not call; use "
                "torch.nn.utils.parametrizations (weight_norm, spectral_norm) instead"
            )
    return stages


def _children_of(model: nn.Module, shape: Shape) -> nn.Sequential:
    """Return a module's children as a sequence that gives its outputs, also for a flatten before the last."""
    children = list(model.named_children())
    flat = [*children[:-1], ("flatten", nn.Flatten()), *children[-1:]]
    reasons = []
    for layers in (children, flat):
        stages = nn.Sequential(OrderedDict(layers))
        if (reason := _difference(model, stages, shape)) is None:
            return stages
        reasons.append(reason)
    raise ValueError(
        f"the model is a {type(model).__name__} that cannot be cut: its children, called in order, {reasons[0]}; "
        "give a list of its stages instead, e.g. [stem, block1, block2, nn.Flatten(), head]"
    )


def own_copy(model: Own, shape: Shape) -> nn.Sequential:
    """Return the stages of a copy of ``model``, on the CPU; the caller's keeps its layers, weights and device."""
    return copy.deepcopy(stages_of(model, shape)).cpu()


def digest_of(model: nn.Module) -> str:
    """Return a short digest of a module's parts: their classes, code, plain attributes and shapes, not their weights.

    Two modules with one digest compute the same function of their weights, as far as this can be seen; another
    version of Python may give the same code another digest.
    """
    digest = hashlib.sha256()
    for name, part in model.named_modules(remove_duplicate=False):
        tensors = part._parameters | part._buffers
        shapes = [(key, one is None or is_lazy(one) or one.shape) for key, one in tensors.items()]
        plain = [(key, one) for key, one in vars(part).items() if _is_plain(one)]
        plain.remove(("training", part.training))
        codes = [
            (key, one.__code__.co_code, list(filter(_is_plain, one.__code__.co_consts)))
            for kind in type(part).__mro__
            if not kind.__module__.startswith("torch.")
            for key, one in vars(kind).items()
            if isinstance(one, FunctionType)
        ]
        digest.update(repr((name, type(part).__qualname__, shapes, plain, codes)).encode())
    return digest.hexdigest()[:8]


def _is_plain(value: object) -> bool:
    """Return whether a value has a representation that is the same in every process."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def check_own(model: nn.Sequential, shape: Shape, classes: int) -> None:
    """Call every layer once; layers that make their weights on the first image make them here.

    Raises ValueError with the name of a layer that fails or whose draws cannot be repeated, and for a model
    that does not make one number per class of an image.
    """
    out = _called_in_turn(model.eval(), torch.zeros(1, *shape), repeatable=False)
    model.train()
    if tuple(out.shape[1:]) != (classes,):
        raise ValueError(
            f"the model makes {list(out.shape[1:])} of an image; it must make {classes} numbers, one per class"
        )
    if out.min() >= 0 and abs(float(out.sum()) - 1) < 1e-5:
        raise ValueError(
            "the model makes probabilities, and training applies the softmax itself; leave out its last softmax"
        )
    copied = copy.deepcopy(model)
    adopt_layers(copied)
    use_generator(copied, torch.Generator())
    _called_in_turn(copied, torch.zeros(2, *shape), repeatable=True)


def _called_in_turn(model: nn.Sequential, x: Tensor, *, repeatable: bool) -> Tensor:
    """Return the output of the layers in turn; ``repeatable``: none may draw from torch's global generator."""
    before = torch.get_rng_state()
    for name, layer in named_layers(model):
        called = f"layer {name!r} ({type(layer).__name__})"
        try:
            with torch.no_grad():
                x = layer(x)
        except Exception as error:  # a user's layers raise what they will
            raise ValueError(f"{called} fails: {_line(error)}") from error
        if repeatable and not torch.equal(before, torch.get_rng_state()):
            raise ValueError(
                f"{called} draws from torch's global random numbers, so that runs could not be repeated; "
                "let an nn.Dropout inside it draw"
            )
    return x


def _difference(model: nn.Module, stages: nn.Sequential, shape: Shape) -> str | None:
    """Return how the outputs of two modules with the same layers differ; None if they do not."""
    images = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
    for training in (False, True):
        expected = _output(model, images, training)
        try:
            got = _output(stages, images, training)
        except Exception as error:
            return f"fail ({_line(error)})"
        if expected.shape != got.shape or not torch.allclose(expected, got, rtol=1e-4, atol=1e-5):
            mode = "train" if training else "eval"
            return f"give other numbers than its forward in {mode} mode"
    return None


def _output(module: nn.Module, images: Tensor, training: bool) -> Tensor:
    """Return the output of a copy, with the same draws on every call."""
    copied = copy.deepcopy(module).cpu().train(training)
    with global_seed(0), torch.no_grad():
        return copied(images)


@contextmanager
def global_seed(seed: int) -> Iterator[None]:
    """Seed torch's global random numbers, from which modules draw their first weights, and restore them after.

    One thread at a time: a program may train several runs side by side, and the global numbers are one for all.
    """
    with _GLOBAL_NUMBERS, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _line(error: Exception) -> str:
    """Return the first line of an error's text; PyTorch's have many."""
    return str(error).strip().partition("\n")[0]
