"""Layers that models are made of: repeatable dropout, residual blocks, fused convolution and pooling."""

from collections import OrderedDict
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from semisfl.engine.kernels import conv_relu_pool, stacked_conv_relu_pool


class Dropout(nn.Module):
    """Dropout that draws from a generator it is given, so that a run can repeat its masks."""

    generator: torch.Generator | None = None

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        keep = torch.empty_like(x).bernoulli_(1 - self.p, generator=self.generator)
        return x * keep.div_(1 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def use_generator(module: nn.Module, generator: torch.Generator) -> None:
    """Let every dropout in ``module`` draw from ``generator``."""
    for layer in module.modules():
        if isinstance(layer, Dropout):
            layer.generator = generator


class Layers(nn.Sequential):
    """A Sequential that does convolution, ReLU and max-pooling as one operation."""

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts():
            x = part.on(x) if isinstance(part, ConvBlock) else part(x)
        return x

    def parts(self) -> list["nn.Module | ConvBlock"]:
        """The layers, those that are computed as one taken together."""
        layers = list(self)
        parts: list[nn.Module | ConvBlock] = []
        while layers:
            layer = layers.pop(0)
            if not _plain_conv(layer) or not layers or type(layers[0]) is not nn.ReLU:
                parts.append(layer)
                continue
            layers.pop(0)
            pool = layers.pop(0) if layers and _plain_pool(layers[0]) else None
            parts.append(ConvBlock(layer, 2 if pool else 1))
        return parts


def named_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers with their names; one that is used twice is there twice, unlike in ``named_children``."""
    return [
        (name, layer)
        for name, layer in model.named_modules(remove_duplicate=False)
        if name and "." not in name
    ]


class Residual(nn.Module):
    """body(x) + shortcut(x); an empty shortcut passes x on."""

    def __init__(self, body: nn.Sequential, shortcut: nn.Sequential | None = None) -> None:
        super().__init__()
        self.body = Layers(OrderedDict(named_layers(body)))
        self.shortcut = Layers(OrderedDict(named_layers(shortcut or Layers())))
        for layer in (*self.body, *self.shortcut):
            if type(layer) is nn.ReLU:
                layer.inplace = False  # both ways read the same x

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x) + self.shortcut(x)
        return out


class ConvBlock(NamedTuple):
    """relu(max_pool(conv(x))), ``pool`` pixels wide."""

    conv: nn.Conv2d
    pool: int

    @property
    def simple(self) -> bool:
        """Whether the fused convolution does this."""
        conv = self.conv
        return (
            conv.stride == conv.dilation == (1, 1)
            and conv.groups == 1
            and not isinstance(conv.padding, str)
            and all(pad < size for pad, size in zip(conv.padding, conv.kernel_size, strict=True))
        )

    def on(self, x: Tensor) -> Tensor:
        conv = self.conv
        out: Tensor = conv_relu_pool(
            x,
            conv.weight,
            conv.bias,
            conv.stride,
            conv.padding,
            conv.dilation,
            conv.groups,
            self.pool,
        )
        return out

    def stacked(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """With weights [clients, ...] that take the place of ``conv``'s, equal shares of ``x`` for each."""
        out: Tensor = stacked_conv_relu_pool(x, weight, bias, self.conv.padding, self.pool)
        return out


def conv_blocks(bottom: nn.Module) -> list[ConvBlock]:
    """What ``bottom`` consists of; `NotFused` if that is more than the fused convolution does."""
    parts = bottom.parts() if type(bottom) is Layers else [bottom]
    if type(parts[-1]) is nn.Flatten:
        parts.pop()
    blocks = []
    for part in parts:
        if not isinstance(part, ConvBlock):
            lonely = ", which no ReLU follows at once" if _plain_conv(part) else ""
            what = "a residual block" if isinstance(part, Residual) else part
            raise NotFused(f"{what}{lonely}")
        if not part.simple:
            raise NotFused(str(part.conv))
        blocks.append(part)
    return blocks


class NotFused(Exception):
    """A layer that the fused convolution does not do."""


def _plain_conv(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    return (
        type(layer) is nn.Conv2d
        and layer.bias is not None
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    )


def _plain_pool(layer: nn.Module) -> bool:
    """2 x 2 pooling without overlap or padding."""
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
