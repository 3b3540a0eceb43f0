"""The operations and their plain forms, which define them and are differentiated by autograd.

A plain form is what a CPU runs and what every fused form is tested against. The same function is also
used on a GPU wherever a fused form does not support an input.

Shapes: images are [clients x images, channels, height, width], the clients side by side; weights of
several clients have a first dimension for the client (they are *stacked*).
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional as F

LIBRARY = torch.library.Library("semisfl", "DEF")
OPERATIONS: dict[str, Callable[..., Any]] = {}
"""The plain forms, by name."""

SHORTEST = 1e-3
"""Rows shorter than this have no direction. Their gradients would have no bound, and their author may be hostile."""


Out = TypeVar("Out")


def _operation(schema: str) -> Callable[[Callable[..., Out]], Callable[..., Out]]:
    """Define ``schema`` with the decorated function as its plain form; return the function to call.

    The function goes through PyTorch's dispatcher, which chooses the CUDA form where one is registered.
    """

    def define(plain: Callable[..., Out]) -> Callable[..., Out]:
        name = schema.partition("(")[0]
        LIBRARY.define(schema)
        LIBRARY.impl(name, plain, "CompositeImplicitAutograd")
        OPERATIONS[name] = plain
        return cast(Callable[..., Out], getattr(torch.ops.semisfl, name).default)

    return define


@_operation("bias_relu_pool(Tensor x, Tensor bias, int pool) -> Tensor")
def bias_relu_pool(x: Tensor, bias: Tensor, pool: int) -> Tensor:
    """Return relu(max_pool2d(x, pool) + bias), pool 1 or 2, with ``bias`` [channels].

    Bias and ReLU are monotonic, so they can follow the pooling, on a quarter of the elements.
    """
    pooled = F.max_pool2d(x, 2) if pool == 2 else x
    return F.relu(pooled + bias.view(-1, 1, 1).to(x.dtype))


@_operation(
    "conv_relu_pool(Tensor x, Tensor weight, Tensor bias, int[2] stride, int[2] padding, "
    "int[2] dilation, int groups, int pool) -> Tensor"
)
def conv_relu_pool(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    pool: int,
) -> Tensor:
    """Return relu(max_pool2d(conv2d(x, weight) + bias, pool)), pool 1 or 2."""
    return bias_relu_pool(F.conv2d(x, weight, None, stride, padding, dilation, groups), bias, pool)


@_operation(
    "stacked_conv_relu_pool(Tensor x, Tensor weight, Tensor bias, int[2] padding, int pool) -> Tensor"
)
def stacked_conv_relu_pool(
    x: Tensor, weight: Tensor, bias: Tensor, padding: Sequence[int], pool: int
) -> Tensor:
    """Return `conv_relu_pool` with stride 1, client by client.

    ``weight`` [clients, output, input, row, column], ``bias`` [clients, output]; the rows of ``x``
    belong to the clients in equal shares.
    """
    convolved = [
        F.conv2d(rows, own, padding=padding)
        for rows, own in zip(x.chunk(len(weight)), weight, strict=True)
    ]
    return torch.cat([bias_relu_pool(y, own, pool) for y, own in zip(convolved, bias, strict=True)])


@_operation(
    "stacked_conv(Tensor x, Tensor weight, Tensor? bias, int[2] stride, int[2] padding, "
    "int[2] dilation, int groups) -> Tensor"
)
def stacked_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Return conv2d, client by client; ``weight``, ``bias`` and the rows of ``x`` as in `stacked_conv_relu_pool`.

    This form is one grouped convolution. ``bias`` may be None.
    """
    biases = [None] * len(weight) if bias is None else list(bias)
    return torch.cat(
        [
            F.conv2d(rows, own, its_bias, stride, padding, dilation, groups)
            for rows, own, its_bias in zip(x.chunk(len(weight)), weight, biases, strict=True)
        ]
    )


@_operation(
    "norm_relu_pool(Tensor x, Tensor? shift, Tensor weight, Tensor bias, Tensor(a!) running_mean, "
    "Tensor(b!) running_var, bool training, float momentum, float eps, bool relu, int pool) -> Tensor"
)
def norm_relu_pool(
    x: Tensor,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
    relu: bool,
    pool: int,
) -> Tensor:
    """Return max_pool2d(relu(batch_norm(x + shift)), pool), each client with its own statistics.

    Everything but ``x`` is [clients, channels]; the rows of ``x`` belong to the clients in equal
    shares. ``shift`` is the bias that the convolution before did not add.
    """
    parts = []
    for client, rows in enumerate(x.chunk(len(weight))):
        if shift is not None:
            rows = rows + shift[client].view(-1, *[1] * (x.dim() - 2)).to(x.dtype)
        mean, var, scale, offset = (t[client] for t in (running_mean, running_var, weight, bias))
        parts.append(F.batch_norm(rows, mean, var, scale, offset, training, momentum, eps))
    out = F.relu(torch.cat(parts)) if relu else torch.cat(parts)
    return F.max_pool2d(out, 2) if pool == 2 else out


@_operation(
    "conv_norm_relu_pool(Tensor x, Tensor kernel, Tensor? shift, int[2] stride, int[2] padding, "
    "int[2] dilation, int groups, Tensor weight, Tensor bias, Tensor(a!) running_mean, "
    "Tensor(b!) running_var, bool training, float momentum, float eps, bool relu, int pool) -> Tensor"
)
def conv_norm_relu_pool(
    x: Tensor,
    kernel: Tensor,
    shift: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *norm: Any,
) -> Tensor:
    """Return `norm_relu_pool` of `stacked_conv` with weights ``kernel`` and bias ``shift``."""
    return norm_relu_pool(
        stacked_conv(x, kernel, None, stride, padding, dilation, groups), shift, *norm
    )


@_operation("linear_relu(Tensor x, Tensor weight, Tensor bias, bool relu) -> Tensor")
def linear_relu(x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
    """Return relu(x weight^T + bias), or without ReLU."""
    out = F.linear(x, weight, bias)
    return F.relu(out) if relu else out


@_operation("unit_rows(Tensor x) -> Tensor")
def unit_rows(x: Tensor) -> Tensor:
    """Return the rows of ``x`` [n, width] scaled to length one, in float32.

    Rows shorter than `SHORTEST` become 0 and have no gradient.
    """
    x = x.float()
    short = x.detach().norm(dim=1, keepdim=True) < SHORTEST
    return F.normalize(x.masked_fill(short, 0), dim=1)


@_operation("cross_entropy(Tensor logits, Tensor labels, Tensor? weights=None) -> Tensor")
def cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean cross-entropy over the rows of logits [n, classes], in float32.

    ``labels`` [n]: a label of -1 counts 0 and is counted in the mean. ``weights`` [n] scale the rows' losses.
    """
    logits = logits.float()
    if weights is None:
        total = F.cross_entropy(logits, labels, reduction="sum", ignore_index=-1)
        return total / len(labels)
    losses = F.cross_entropy(logits, labels, reduction="none", ignore_index=-1)
    return (losses * weights).mean()


@_operation(
    "contrast(Tensor projections, Tensor labels, Tensor keys, Tensor key_labels, Tensor positive, "
    "Tensor present, float temperature, Tensor? mask=None) -> Tensor"
)
def contrast(
    projections: Tensor,
    labels: Tensor,
    keys: Tensor,
    key_labels: Tensor,
    positive: Tensor,
    present: Tensor,
    temperature: float,
    mask: Tensor | None = None,
) -> Tensor:
    """Return the mean contrastive loss over the anchors: see `semisfl.algorithm.losses.contrastive`.

    ``projections`` [n, width] and ``keys`` [r, width] have unit length; ``mask`` [n, r] takes single
    references away from single anchors.
    """
    with torch.autocast(projections.device.type, enabled=False):
        similarity = projections.float() @ keys.float().T / temperature
    absent = ~present.unsqueeze(0)
    if mask is not None:
        absent = absent | mask
    # A large finite number, not -inf: an anchor whose references are all absent must not give NaN.
    similarity = similarity.masked_fill(absent, -1e9)
    log_share = similarity - similarity.logsumexp(dim=1, keepdim=True)
    positives = (labels.unsqueeze(1) == key_labels.unsqueeze(0)) & positive & ~absent
    counts = positives.sum(1).clamp(min=1)
    return -((log_share * positives).sum(1) / counts).mean()


@_operation(
    "normalized_row(Tensor views, Tensor counter, Tensor scale, Tensor offset, ScalarType dtype) -> Tensor"
)
def normalized_row(
    views: Tensor, counter: Tensor, scale: Tensor, offset: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return offset + scale x of the uint8 images ``views[counter]``, channels-last in memory.

    ``views`` [steps, images, channels, height, width], ``counter`` [1], ``scale`` and ``offset`` [channels].
    """
    values = views.index_select(0, counter)[0].permute(0, 2, 3, 1).contiguous().float()
    return torch.addcmul(offset, values, scale).to(dtype).permute(0, 3, 1, 2)


@_operation(
    "sgd_step(Tensor(a!) master, Tensor(b!) work, Tensor(c!) momentum, Tensor gradient, Tensor lr, "
    "float weight_decay, float momentum_factor, bool nesterov, Tensor(d!)? teacher=None, "
    "Tensor(e!)? teacher_work=None, Tensor? ema_decay=None, Tensor? scale=None, "
    "Tensor? base=None, float l2=0., float l1=0.) -> ()"
)
def sgd_step(
    master: Tensor,
    work: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    lr: Tensor,
    weight_decay: float,
    momentum_factor: float,
    nesterov: bool,
    teacher: Tensor | None = None,
    teacher_work: Tensor | None = None,
    ema_decay: Tensor | None = None,
    scale: Tensor | None = None,
    base: Tensor | None = None,
    l2: float = 0.0,
    l1: float = 0.0,
) -> None:
    """Take one SGD step of full-precision weights [rows, size]; ``work`` is their copy in another type.

    The three have the same stride between rows; ``gradient`` is contiguous. ``teacher``: weights of
    the same layout that follow as a moving average, their working copy, and their decay. ``scale``:
    a factor of the gradient, for example to limit its norm. ``base``: the difference of ``work`` and
    ``master``; the step then also descends l2 |master - base|^2 + l1 |master|_1.
    """
    gradient = gradient.view_as(master).float()
    gradient = gradient if scale is None else scale * gradient
    gradient = gradient.add(master, alpha=weight_decay)
    if base is not None:
        gradient.add_(master - base, alpha=2 * l2).add_(master.sign(), alpha=l1)
    torch.add(gradient, momentum, alpha=momentum_factor, out=momentum)
    step = gradient.add_(momentum, alpha=momentum_factor) if nesterov else momentum
    master.addcmul_(step, lr, value=-1)
    if base is None:
        work.copy_(master)
    else:
        torch.add(master, base, out=work)
    if teacher is not None and teacher_work is not None and ema_decay is not None:
        teacher.lerp_(master, 1 - ema_decay)
        teacher_work.copy_(teacher)


@_operation("ema_step(Tensor(a!) target, Tensor source, Tensor(b!)? work, Tensor decay) -> ()")
def ema_step(target: Tensor, source: Tensor, work: Tensor | None, decay: Tensor) -> None:
    """Set target <- decay target + (1 - decay) source; ``work`` copies the head of ``target``."""
    target.lerp_(source, 1 - decay)
    if work is not None:
        work.copy_(target[: work.numel()])
