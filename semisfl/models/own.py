"""Models that users write: any module that can be cut, as a sequence of stages."""

import copy
import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from semisfl.models.layers import adopt_layers, named_layers, use_generator
from semisfl.models.shapes import Shape

Own = nn.Module | Sequence[nn.Module]
"""An ``nn.Sequential``, a module whose children are called in order, or a list of stages."""
_GLOBAL_NUMBERS = RLock()
STAGES = "give a list of its stages instead, e.g. [stem, block1, block2, nn.Flatten(), head]"


def feature_shape(module: nn.Module, shape: Shape) -> tuple[int, ...]:
    """Return the shape of one image's output, by passing zeros through."""
    return _sides(_zeros_through(module, shape))


def _zeros_through(module: nn.Module, shape: Shape) -> object:
    mode = module.training
    module.eval()
    with torch.no_grad():
        like = next(module.parameters(), torch.empty(0))
        out: object = module(torch.zeros(1, *shape, dtype=like.dtype, device=like.device))
    module.train(mode)
    return out


def _sides(out: object) -> tuple[int, ...]:
    """Return the shape of one image's output; raise ValueError unless it is a tensor."""
    if not isinstance(out, Tensor):
        raise ValueError(
            f"the model, or its part before the cut, returns a {type(out).__name__}; it must return one tensor"
        )
    return tuple(out.shape[1:])


def is_sequential(model: Own) -> bool:
    """Return whether ``model`` is an ``nn.Sequential`` that only calls its layers in order."""
    if not isinstance(model, nn.Sequential):
        return False
    return type(model).__module__.startswith("semisfl.") or (
        type(model).forward is nn.Sequential.forward
    )


def stages_of(model: Own, shape: Shape) -> nn.Sequential:
    """Return ``model`` as a sequence of its own layers; raise ValueError with the reason if it cannot be cut.

    A module is called and compared with its children in order, in eval and in train mode. A flatten that
    its forward has between a picture and its last linear layer is added.
    """
    if isinstance(model, nn.Module) and is_sequential(model):
        assert isinstance(model, nn.Sequential)
        _refuse_hooks(model)
        return model
    if isinstance(model, list | tuple | nn.ModuleList) and len(model):
        if all(isinstance(stage, nn.Module) for stage in model):
            stages = OrderedDict((f"stage{n}", one) for n, one in enumerate(model, 1))
            _refuse_hooks(stacked := nn.Sequential(stages))
            return stacked
        raise ValueError("the model is a list whose entries are not all modules; give nn.Modules")
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"the model is a {type(model).__name__}; it must be an nn.Module or a list of stages"
        )
    _refuse_hooks(model)
    children = list(model.named_children())
    if len(children) < 2:
        raise ValueError(
            f"the model is a {type(model).__name__} with {len(children)} modules inside, and two or more are "
            f"needed to cut between them; {STAGES}"
        )
    plain = nn.Sequential(OrderedDict(children))
    reason = _difference(model, plain, shape)
    if reason is None:
        return plain
    *before, last = children
    flat = nn.Sequential(OrderedDict([*before, ("flatten", nn.Flatten()), last]))
    if "flatten" not in dict(children) and _difference(model, flat, shape) is None:
        return flat
    raise ValueError(
        f"the model is a {type(model).__name__} that cannot be cut: its children, called in order, {reason}; "
        f"{STAGES}"
    )


def own_copy(model: Own, shape: Shape) -> nn.Sequential:
    """Return the stages of a copy, on the CPU; the caller's ``model`` keeps its layers, weights and device."""
    return copy.deepcopy(stages_of(model, shape)).cpu()


def digest_of(model: nn.Module) -> str:
    """Return a short digest of a module's parts: their classes, code, plain attributes and shapes, not their weights."""
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
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _refuse_hooks(model: nn.Module) -> None:
    """Raise ValueError for forward hooks: layers that are computed together do not call them."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
            continue  # its own hook makes the weights, and is gone after the first image
        if layer._forward_hooks or layer._forward_pre_hooks:
            raise ValueError(
                f"{_called(name, layer)} has a forward hook, which training does not call; remove it, or use "
                "torch.nn.utils.parametrizations (weight_norm, spectral_norm) instead"
            )


def _called(name: str, layer: nn.Module) -> str:
    return f"layer {name!r} ({type(layer).__name__})" if name else "the model"


def _instead_of_random(layer: nn.Module) -> str | None:
    """Return what to use instead of a layer that draws from torch's global generator; None for any other."""
    if isinstance(layer, nn.modules.dropout._DropoutNd):
        return "use nn.Dropout" if layer.p and type(layer) is not nn.Dropout else None
    if isinstance(layer, nn.RReLU):
        return "use nn.LeakyReLU"
    if isinstance(layer, nn.FractionalMaxPool2d | nn.FractionalMaxPool3d):
        return "use nn.AdaptiveMaxPool2d"
    if isinstance(layer, nn.MultiheadAttention | nn.RNNBase) and layer.dropout:
        return "set its dropout to 0"
    return None


def refuse_one_layer(layers: int) -> None:
    if layers < 2:
        raise ValueError(
            f"the model has {'one layer' if layers else 'no layers'}, and two or more are needed to cut between them"
        )


def check_own(model: nn.Sequential, shape: Shape, classes: int) -> None:
    """Raise ValueError for a model that cannot be trained, or does not make one number per class of an image."""
    refuse_one_layer(len(model))
    for name, layer in model.named_modules():
        if not all(one.requires_grad for one in layer.parameters(recurse=False)):
            raise ValueError(
                f"{_called(name, layer)} has parameters with requires_grad = False, and all are trained; call "
                "model.requires_grad_() first"
            )
        if other := {one.dtype for one in layer.parameters(recurse=False)} - {torch.float32}:
            raise ValueError(
                f"{_called(name, layer)} has parameters of {other.pop()}, and models are trained in torch.float32; "
                "call model.float() first"
            )
        if (instead := _instead_of_random(layer)) is not None:
            raise _draws(name, layer, instead)
    try:
        result = _zeros_through(model, shape)
    except Exception as error:  # a user's layers raise what they will
        raise _cannot_take(shape, error) from error
    if (out := _sides(result)) != (classes,):
        raise ValueError(
            f"the model makes {list(out)} of an image; it must make {classes} numbers, one per class"
        )
    assert isinstance(result, Tensor)
    if result.min() >= 0 and abs(float(result.sum()) - 1) < 1e-5:
        raise ValueError(
            "the model makes probabilities, and training applies the softmax itself; leave out its last softmax"
        )
    _check_repeatable(model, shape)


def _check_repeatable(model: nn.Sequential, shape: Shape) -> None:
    """Raise ValueError for a layer whose own code draws from torch's global generator while it is trained."""
    copied, x = copy.deepcopy(model).train(), torch.zeros(2, *shape)
    adopt_layers(copied)
    use_generator(copied, torch.Generator())
    before = torch.get_rng_state()
    for name, layer in named_layers(copied):
        try:
            with torch.no_grad():
                x = layer(x)
        except Exception as error:
            raise _cannot_take(shape, error) from error
        if not torch.equal(before, torch.get_rng_state()):
            raise _draws(name, layer, "let an nn.Dropout inside it draw")


def _draws(name: str, layer: nn.Module, instead: str) -> ValueError:
    return ValueError(
        f"{_called(name, layer)} draws from torch's global random numbers, so that runs could not be "
        f"repeated; {instead}"
    )


def _difference(model: nn.Module, stages: nn.Sequential, shape: Shape) -> str | None:
    """Return how the outputs of two modules with the same layers differ; None if they do not."""
    images = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
    for mode in ("eval", "train"):
        try:
            expected = _output(model, images, mode == "train")
        except Exception as error:
            raise _cannot_take(shape, error) from error
        _sides(expected)
        try:
            got = _output(stages, images, mode == "train")
        except Exception as error:
            return f"fail ({_line(error)})"
        if not isinstance(got, Tensor) or expected.shape != got.shape:
            return "give another shape than its forward"
        if not torch.allclose(expected, got, rtol=1e-4, atol=1e-5):
            return f"give other numbers than its forward in {mode} mode"
    return None


def _output(module: nn.Module, images: Tensor, training: bool) -> Any:
    """Return the output of a copy, with the same draws on every call."""
    copied = copy.deepcopy(module).cpu().train(training)
    with globally_seeded(0), torch.no_grad():
        return copied(images)


@contextmanager
def globally_seeded(seed: int) -> Iterator[None]:
    """Seed torch's global random numbers, from which modules draw their first weights, and restore them after.

    One thread at a time: a program may train several runs side by side.
    """
    with _GLOBAL_NUMBERS, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _cannot_take(shape: Shape, error: Exception) -> ValueError:
    where = ", ".join(map(str, shape))
    return ValueError(f"the model cannot take images [n, {where}]: {_line(error)}")


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
