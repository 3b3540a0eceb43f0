"""The layers of models that PyTorch does not have as modules, and blocks of layers that are computed together.

Convolution, BatchNorm, ReLU and pooling that follow one another are one call of a fused kernel
(`semisfl.engine.kernels`). Weights, their names and the results are those of the single layers.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semisfl.engine.kernels import (
    conv_norm_relu_pool,
    conv_relu_pool,
    linear_relu,
    norm_relu_pool,
)


class Dropout(nn.Module):
    """Dropout with its own generator, so that a run can repeat its masks.

    ``p``: the probability of setting a value to 0, from 0 to 1. Without a generator (`use_generator`) it draws from
    torch's global one.
    """

    generator: torch.Generator | None = None

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` with a share ``p`` of its values at 0 and the others enlarged; in eval mode ``x`` itself."""
        if not self.training or self.p == 0:
            return x
        keep = torch.empty_like(x).bernoulli_(1 - self.p, generator=self.generator)
        return x * keep.div_(1 - self.p)


def use_generator(module: nn.Module, generator: torch.Generator) -> None:
    """Let every dropout in ``module`` draw from ``generator``, which lives on the module's device."""
    for layer in module.modules():
        if isinstance(layer, Dropout):
            layer.generator = generator


def batchnorms(module: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """Return the BatchNorm layers of ``module`` that normalise by a batch in training, in the order of its layers."""
    return [
        layer
        for layer in module.modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and not isinstance(layer, _Stored)
    ]


class _Stored(nn.Module):
    """Stay in eval mode: BatchNorm then normalises by its stored statistics, also in training."""

    def train(self, mode: bool = True) -> "_Stored":
        return super().train(False)


class StoredNorm1d(_Stored, nn.BatchNorm1d):
    """BatchNorm of flat features by its stored statistics; scale and offset are trained."""


class StoredNorm2d(_Stored, nn.BatchNorm2d):
    """BatchNorm of pictures by its stored statistics; scale and offset are trained."""


NORMS = {nn.BatchNorm1d: StoredNorm1d, nn.BatchNorm2d: StoredNorm2d}


def keep_statistics(module: nn.Module) -> None:
    """Let every BatchNorm in ``module`` normalise by the statistics that it has, which then never change."""
    for layer in batchnorms(module):
        if type(layer) in NORMS and layer.track_running_stats:
            layer.__class__ = NORMS[type(layer)]
            layer.eval()


class Layers(nn.Sequential):
    """A Sequential that fuses convolution, BatchNorm, ReLU, max-pooling and linear layers where they follow one another.

    It has the names, weights and results of a plain ``nn.Sequential``.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layers, blocks of them at a time."""
        for part in parts_of(self):
            if not isinstance(part, nn.Module):
                x = part.on(x)
                continue
            images = x.is_cpu and torch.is_grad_enabled() and not x.requires_grad
            if images and not plain_conv(part):
                # A group_norm in it may be the first to see the images: torch's gradient of its weights ends the
                # process on a CPU if such an input lies channels-last.
                x = x.clone(memory_format=torch.contiguous_format)
            x = part(x)
        return x


Named = tuple[str, nn.Module]


def named_layers(model: nn.Module) -> list[Named]:
    """Return the layers with their names; unlike ``named_children``, a layer used twice is listed twice."""
    return [
        (name, layer)
        for name, layer in model.named_modules(remove_duplicate=False)
        if name and "." not in name
    ]


def cut_layers(model: nn.Module) -> tuple[list[Named], list[Named]]:
    """Return the layers of bottom and top with their names, without the flatten and unflatten that a cut adds."""
    bottom, top = (named_layers(model.get_submodule(part)) for part in ("bottom", "top"))
    if isinstance(top[0][1], nn.Unflatten):
        return bottom[:-1], top[1:]
    return bottom, top


def adopt_layers(module: nn.Module) -> None:
    """Replace every plain ``nn.Dropout`` in ``module`` by `Dropout`, in place."""
    for name, child in named_layers(module):
        if type(child) is nn.Dropout:
            setattr(module, name, Dropout(child.p))
        else:
            adopt_layers(child)


def keep_inputs(module: nn.Module) -> None:
    """Let no layer in ``module`` overwrite its input."""
    for layer in module.modules():
        if getattr(layer, "inplace", False):
            layer.inplace = False  # type: ignore[assignment]


class Residual(nn.Module):
    """body(x) + shortcut(x); an empty shortcut passes x on. The sum has no ReLU after it."""

    def __init__(self, body: nn.Sequential, shortcut: nn.Sequential | None = None) -> None:
        super().__init__()
        self.body = Layers(OrderedDict(named_layers(body)))
        self.shortcut = Layers(OrderedDict(named_layers(shortcut or Layers())))
        keep_inputs(self)  # body and shortcut read the same x

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum for pictures or flat features."""
        return self.body(x) + self.shortcut(x)


class Gate(nn.Module):
    """x body(x): squeeze-and-excitation. The body gives a picture of one pixel, or one of the size of x."""

    def __init__(self, body: nn.Sequential) -> None:
        """Take the layers that make the factors."""
        super().__init__()
        self.body = Layers(OrderedDict(named_layers(body)))
        keep_inputs(self)  # the body and the product read the same x

    def forward(self, x: Tensor) -> Tensor:
        """Return the product; a body that gives one number per channel scales whole channels."""
        return x * self.body(x)


class PaddedConv(nn.Conv2d):
    """A convolution with other margins left than right, or above than below, as TensorFlow's "same" has them."""

    def __init__(self, *arguments: Any, margins: tuple[int, int, int, int], **more: Any) -> None:
        """Take the pixels to add: left, right, above, below; the other arguments are those of ``nn.Conv2d``."""
        super().__init__(*arguments, **more)
        self.margins = margins

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution of the padded pictures."""
        return super().forward(F.pad(x, self.margins))


class PositionNorm(nn.LayerNorm):
    """LayerNorm over the channels at each position of pictures [n, channels, height, width].

    ConvNeXt has it; PyTorch's LayerNorm normalises the last axes, so the channels are moved there and back.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return pictures of the same shape."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Scale(nn.Module):
    """Multiply each channel of pictures, or each column of tokens or flat features, by a learned factor.

    ``columns``: how many factors there are; ``start``: what they are before training.
    """

    def __init__(self, columns: int, start: float) -> None:
        super().__init__()
        self.start = start
        self.weight = nn.Parameter(torch.full((columns,), start))

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled values in the shape of ``x``."""
        return x * (self.weight.view(-1, 1, 1) if x.dim() == 4 else self.weight)


class Tokens(nn.Module):
    """Turn pictures [n, channels, height, width] into tokens [n, height x width, channels], row by row."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens of pictures, row by row."""
        return x.flatten(2).transpose(1, 2)


class ClassToken(nn.Module):
    """Put a learned token before the tokens [n, count, width], so that there are count + 1.

    Its first values are drawn from a normal distribution of deviation 0.02, as those of `Positions`.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Return one token more for each image."""
        return torch.cat([self.weight.expand(x.shape[0], 1, -1).to(x.dtype), x], 1)


class Positions(nn.Module):
    """Add a learned vector to each of the tokens [n, count, width]: without it attention would not know their order."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens with their places' vectors added."""
        return x + self.weight


class Attention(nn.Module):
    """Self-attention over tokens [n, count, width]; ``qkv`` makes queries, keys and values in one product.

    ``heads`` divides ``width``; ``bias``: whether ``qkv`` has one.
    """

    def __init__(self, width: int, heads: int, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        # [n, count, 3, heads, width / heads] -> three tensors [n, heads, count, width / heads]
        """Return tokens of the same shape, each a mixture of all tokens of its image."""
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out: Tensor = F.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        return self.proj(out.transpose(1, 2).flatten(2))


class FirstToken(nn.Module):
    """Keep the first of the tokens [n, count, width] as flat features [n, width]: what the class token has gathered."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the class token of each image."""
        return x[:, 0]


def conv_arguments(conv: nn.Conv2d) -> tuple[Any, ...]:
    """Return the convolution's stride, padding, dilation and groups, as the operations take them."""
    return conv.stride, conv.padding, conv.dilation, conv.groups


class ConvBlock(NamedTuple):
    """relu(max_pool(conv(x))), which is relu after pooling: the same values with fewer comparisons.

    ``pool``: side of the pooled square in pixels, 1 or 2.
    """

    conv: nn.Conv2d
    pool: int

    def on(self, x: Tensor) -> Tensor:
        """Return the block's output for images [n, C, H, W]."""
        conv = self.conv
        return conv_relu_pool(x, conv.weight, conv.bias, *conv_arguments(conv), self.pool)


class NormBlock(NamedTuple):
    """max_pool(relu(norm(conv(x)))), of which only the BatchNorm must be there.

    ``layers`` are those that are there, in order; ``pool``: side of the pooled square in pixels, 1 or 2.
    """

    layers: tuple[nn.Module, ...]
    conv: nn.Conv2d | None
    norm: nn.BatchNorm1d | nn.BatchNorm2d
    relu: bool
    pool: int

    def on(self, x: Tensor) -> Tensor:
        """Return the block's output; running statistics are updated in train mode, as by the layers themselves."""
        # A CPU gains nothing. A cumulative average (no momentum) is rare and not fused.
        if x.is_cuda and self.norm.momentum is not None:
            return self.of_copies(x, lambda weight: weight.unsqueeze(0))
        for layer in self.layers:
            x = layer(x)
        return x

    def of_copies(self, x: Tensor, rows: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute several copies of the block, each on an equal share of ``x`` [copies * n, ...].

        ``rows`` returns, for a weight of this block, that weight of all copies as one tensor [copies, ...].
        """
        norm, conv = self.norm, self.conv
        if norm.training and norm.num_batches_tracked is not None:
            rows(norm.num_batches_tracked).add_(1)
        assert norm.running_mean is not None and norm.running_var is not None
        of_norm = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
        how = (norm.training, norm.momentum, norm.eps, self.relu, self.pool)
        after = (*(rows(weight) for weight in of_norm), *how)
        if conv is None:
            return norm_relu_pool(x, None, *after)
        bias = None if conv.bias is None else rows(conv.bias)
        return conv_norm_relu_pool(x, rows(conv.weight), bias, *conv_arguments(conv), *after)


class LinearBlock(NamedTuple):
    """relu(linear(x)), or without ReLU."""

    layers: tuple[nn.Module, ...]
    linear: nn.Linear
    relu: bool

    def on(self, x: Tensor) -> Tensor:
        """Return the block's output for features [n, d], or for tokens [n, count, d]."""
        if x.is_cuda and x.dim() == 2:
            return linear_relu(x, self.linear.weight, self.linear.bias, self.relu)
        for layer in self.layers:
            x = layer(x)
        return x


Part = nn.Module | ConvBlock | NormBlock | LinearBlock


def parts_of(sequence: Iterable[nn.Module]) -> list[Part]:
    """Return the layers of a sequence in order, with those that are computed together as one block.

    Convolution, ReLU and 2 x 2 pooling are a `ConvBlock`; BatchNorm with what stands around it is a `NormBlock`; a
    linear layer and its ReLU are a `LinearBlock`. A class derived from one of these layers is left alone: it may have a
    forward of its own.
    """
    layers = list(sequence)
    parts: list[Part] = []
    while layers:
        first = layers.pop(0)
        if plain_conv(first) and layers and type(layers[0]) is nn.ReLU and first.bias is not None:
            layers.pop(0)
            parts.append(ConvBlock(first, 2 if _taken_pool(layers) else 1))
            continue
        if type(first) is nn.Linear and first.bias is not None:
            relu = _taken_relu(layers)
            parts.append(LinearBlock((first, *relu), first, bool(relu)))
            continue
        conv = first if plain_conv(first) and layers and plain_norm(layers[0]) else None
        norm = layers.pop(0) if conv is not None else first
        if not plain_norm(norm):
            parts.append(first)
            continue
        relu = _taken_relu(layers)
        pool = _taken_pool(layers) if relu else []
        together = (*([conv] if conv is not None else []), norm, *relu, *pool)
        parts.append(NormBlock(together, conv, norm, bool(relu), 2 if pool else 1))
    return parts


def _taken_relu(layers: list[nn.Module]) -> list[nn.Module]:
    return [layers.pop(0)] if layers and type(layers[0]) is nn.ReLU else []


def _taken_pool(layers: list[nn.Module]) -> list[nn.Module]:
    return [layers.pop(0)] if layers and _plain_pool(layers[0]) else []


def plain_conv(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Return whether a layer is a convolution that the fused kernels compute; a derived class may do something else."""
    return (
        type(layer) is nn.Conv2d
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    )


def plain_norm(layer: nn.Module) -> TypeGuard[nn.BatchNorm1d | nn.BatchNorm2d]:
    """Return whether a layer is a BatchNorm that the fused kernels compute: with weights and running statistics."""
    # The class itself: one derived from it may have a forward of its own.
    if type(layer) not in (*NORMS, *NORMS.values()):
        return False
    assert isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d)
    return layer.affine and layer.track_running_stats


def _plain_pool(layer: nn.Module) -> bool:
    """Return whether this is 2 x 2 pooling without overlap or padding."""
    if type(layer) is not nn.MaxPool2d or layer.ceil_mode or layer.return_indices:
        return False
    return all(
        value in (wanted, (wanted, wanted))
        for value, wanted in (
            (layer.kernel_size, 2),
            (layer.stride, 2),
            (layer.padding, 0),
            (layer.dilation, 1),
        )
    )
