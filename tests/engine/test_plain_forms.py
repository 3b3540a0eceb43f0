"""The plain form of every operation against what it is said to mean. Their CUDA forms: test_kernels.py."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from semisfl.engine import kernels
from semisfl.engine.kernels.plain import OPERATIONS

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng((seed, *shape)).normal(size=shape)).float()


def same_with_gradients(
    mine: Callable[..., Tensor], plain: Callable[..., Tensor], *leaves: Tensor
) -> None:
    leaves = tuple(leaf.requires_grad_() for leaf in leaves)
    got, wanted = mine(*leaves), plain(*leaves)
    torch.testing.assert_close(got, wanted)
    upstream = random(*got.shape, seed=9)
    for one, two in zip(
        torch.autograd.grad(got, leaves, upstream),
        torch.autograd.grad(wanted, leaves, upstream),
        strict=True,
    ):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def check_bias_relu_pool() -> None:
    for pool in (1, 2):
        same_with_gradients(
            lambda x, bias, pool=pool: kernels.bias_relu_pool(x, bias, pool),
            lambda x, bias, pool=pool: F.max_pool2d(F.relu(x + bias.view(-1, 1, 1)), pool),
            random(3, 5, 7, 6),
            random(5),
        )


def check_conv_relu_pool() -> None:
    for stride, padding, dilation, groups, pool in (
        ((1, 1), (0, 0), (1, 1), 1, 2),
        ((2, 1), (1, 2), (1, 1), 1, 1),
        ((1, 1), (2, 1), (2, 1), 2, 2),
    ):
        options = stride, padding, dilation, groups

        def mine(x: Tensor, w: Tensor, b: Tensor, o: tuple = options, pool: int = pool) -> Tensor:
            return kernels.conv_relu_pool(x, w, b, *o, pool)

        def plain(x: Tensor, w: Tensor, b: Tensor, o: tuple = options, pool: int = pool) -> Tensor:
            return F.max_pool2d(F.relu(F.conv2d(x, w, b, *o)), pool)

        same_with_gradients(
            mine, plain, random(2, 4, 9, 8), random(6, 4 // groups, 3, 2), random(6)
        )


def check_stacked_conv_relu_pool() -> None:
    """Client by client, each with its own weights, its rows where the others' are not."""
    for clients, padding, pool in ((3, (1, 0), 2), (1, (0, 0), 1), (2, (2, 1), 1)):

        def mine(x: Tensor, w: Tensor, b: Tensor, p: tuple = padding, pool: int = pool) -> Tensor:
            return kernels.stacked_conv_relu_pool(x, w, b, p, pool)

        def plain(
            x: Tensor,
            w: Tensor,
            b: Tensor,
            p: tuple = padding,
            pool: int = pool,
            clients: int = clients,
        ) -> Tensor:
            rows = [
                F.max_pool2d(F.relu(F.conv2d(x[i : i + 1], w[i // 2], b[i // 2], padding=p)), pool)
                for i in range(2 * clients)
            ]
            return torch.cat(rows)

        same_with_gradients(
            mine,
            plain,
            random(2 * clients, 3, 6, 7),
            random(clients, 5, 3, 3, 2),
            random(clients, 5),
        )


def check_stacked_conv() -> None:
    for stride, padding, dilation, groups, biased in (
        ((1, 1), (1, 0), (1, 1), 1, True),
        ((2, 1), (0, 2), (1, 2), 2, False),
    ):
        options = stride, padding, dilation, groups
        weight, bias = random(2, 6, 4 // groups, 3, 2), random(2, 6)

        def mine(x: Tensor, w: Tensor, *b: Tensor, o: tuple = options) -> Tensor:
            return kernels.stacked_conv(x, w, *(b or [None]), *o)

        def plain(x: Tensor, w: Tensor, *b: Tensor, o: tuple = options) -> Tensor:
            rows = [
                F.conv2d(x[i : i + 1], w[i // 2], b[0][i // 2] if b else None, *o) for i in range(4)
            ]
            return torch.cat(rows)

        same_with_gradients(mine, plain, random(4, 4, 7, 8), weight, *([bias] if biased else []))


def check_norm_relu_pool() -> None:
    """By hand, in the mean and deviation of each client's own images; what is kept for later, too."""
    for training, relu, pool, shape in (
        (True, True, 2, (6, 5, 7, 6)),
        (True, False, 1, (6, 5)),
        (False, True, 1, (6, 5, 3, 3)),
    ):
        start = [random(2, 5, seed=seed) for seed in (1, 2)]
        kept = [start[0].clone(), start[1].abs() + 0.5]
        before = [tensor.clone() for tensor in kept]
        view = (2, 1, 5, *[1] * (len(shape) - 2))
        over = (1, *range(3, len(shape) + 1))

        def mine(
            x: Tensor, s: Tensor, w: Tensor, b: Tensor, how: tuple = (training, relu, pool)
        ) -> Tensor:
            training, relu, pool = how
            return kernels.norm_relu_pool(x, s, w, b, *kept, training, 0.1, 1e-3, relu, pool)  # noqa: B023

        def plain(
            x: Tensor, s: Tensor, w: Tensor, b: Tensor, how: tuple = (training, relu, pool)
        ) -> Tensor:
            training, relu, pool = how
            each = x.unflatten(0, (2, 3)) + s.view(view)  # noqa: B023
            mean, variance = (
                (each.mean(over, keepdim=True), each.var(over, correction=0, keepdim=True))  # noqa: B023
                if training
                else (tensor.view(view) for tensor in before)  # noqa: B023
            )
            out = (each - mean) / (variance + 1e-3).sqrt() * w.view(view) + b.view(view)  # noqa: B023
            out = out.flatten(0, 1)
            out = F.relu(out) if relu else out
            return F.max_pool2d(out, 2) if pool == 2 else out

        x, shift = random(*shape), random(2, 5, seed=3)
        same_with_gradients(mine, plain, x, shift, random(2, 5, seed=4), random(2, 5, seed=5))
        if training:
            each = (x.detach().unflatten(0, (2, 3)) + shift.detach().view(view)).double()
            now = each.mean(over), each.var(over, correction=1)
            for got, old, new in zip(kept, before, now, strict=True):
                torch.testing.assert_close(got.double(), 0.9 * old.double() + 0.1 * new)
        else:
            assert all(map(torch.equal, kept, before))


def check_conv_norm_relu_pool() -> None:
    """A convolution with its bias, then the rest; the bias itself has no gradient in training."""
    x, kernel, shift = random(4, 4, 9, 8), random(2, 6, 2, 3, 3), random(2, 6)
    how, running = ((2, 1), (1, 0), (1, 1), 2), [torch.zeros(2, 6), torch.ones(2, 6)]

    def mine(x: Tensor, k: Tensor, w: Tensor, b: Tensor) -> Tensor:
        kept = [tensor.clone() for tensor in running]
        return kernels.conv_norm_relu_pool(x, k, shift, *how, w, b, *kept, True, 0.1, 1e-5, True, 2)

    def plain(x: Tensor, k: Tensor, w: Tensor, b: Tensor) -> Tensor:
        out = []
        for i in range(2):
            y = F.conv2d(x[2 * i : 2 * i + 2], k[i], shift[i], *how)
            out.append(F.batch_norm(y, None, None, w[i], b[i], True))
        return F.max_pool2d(F.relu(torch.cat(out)), 2)

    same_with_gradients(mine, plain, x, kernel, random(2, 6, seed=4), random(2, 6, seed=5))


def check_linear_relu() -> None:
    for relu in (False, True):
        same_with_gradients(
            lambda x, w, b, relu=relu: kernels.linear_relu(x, w, b, relu),
            lambda x, w, b, relu=relu: (x @ w.T + b).clamp(min=0 if relu else -1e9),
            *(random(4, 5), random(3, 5, seed=1), random(3, seed=2)),
        )


def check_unit_rows() -> None:
    same_with_gradients(
        kernels.unit_rows, lambda x: x / x.square().sum(1, keepdim=True).sqrt(), random(4, 6)
    )
    tiny = torch.tensor([[0.0, 0.0], [0.0, 9e-4], [0.0, 1e-2]], requires_grad=True)
    unit = kernels.unit_rows(tiny)
    (of_tiny,) = torch.autograd.grad(unit.sum(), tiny)
    assert unit.tolist() == [[0, 0], [0, 0], [0, 1]]
    assert of_tiny.tolist() == [[0, 0], [0, 0], [pytest.approx(1e2), 0]]
    assert kernels.unit_rows(torch.tensor([[math.nan, 1e-9]])).isnan().all()
    assert kernels.unit_rows(random(2, 3).bfloat16()).dtype is torch.float32


def check_cross_entropy() -> None:
    """Of three rows; the mean is over all of them, whatever their labels and weights are."""
    logits, labels = random(3, 4), torch.tensor([2, 0, -1])
    log_share = logits.log_softmax(1)
    taken = -log_share[torch.arange(3), labels]
    weighted = (taken[0] * 0.5 + taken[1] * 2) / 3
    mine = kernels.cross_entropy(logits, labels, torch.tensor([0.5, 2.0, 7.0]))
    torch.testing.assert_close(mine, weighted)
    torch.testing.assert_close(kernels.cross_entropy(logits[:2], labels[:2]), taken[:2].mean())
    torch.testing.assert_close(kernels.cross_entropy(logits, labels), taken[:2].sum() / 3)


def check_contrast() -> None:
    """Three anchors, four keys: one of another label, one not a positive, one absent, one masked."""
    z, keys = F.normalize(random(3, 4), dim=1), F.normalize(random(4, 4, seed=1), dim=1)
    labels, key_labels = torch.tensor([0, 1, 0]), torch.tensor([0, 1, 0, 0])
    positive = torch.tensor([True, True, False, True])
    present = torch.tensor([True, True, True, False])
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[2, 0] = True
    s = (z @ keys.T / 0.5).double().exp().tolist()
    # Anchor 0 has key 0, anchor 1 key 1; anchor 2 loses key 0 and has no positive left.
    terms = [math.log(s[0][0] / sum(s[0][:3])), math.log(s[1][1] / sum(s[1][:3])), 0.0]
    got = kernels.contrast(z, labels, keys, key_labels, positive, present, 0.5, mask)
    assert float(got) == pytest.approx(-sum(terms) / 3, rel=1e-5)


def check_normalized_row() -> None:
    rng = np.random.default_rng(3)
    views = torch.from_numpy(rng.integers(0, 256, (4, 5, 3, 6, 7), dtype=np.uint8))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    scale, offset = (1 / (255 * std)).flatten(), (-mean / std).flatten()
    for row in (0, 2, 3):
        got = kernels.normalized_row(views, torch.tensor([row]), scale, offset, torch.float32)
        torch.testing.assert_close(got, (views[row].float() / 255 - mean) / std)
        assert got.is_contiguous(memory_format=torch.channels_last)
    half = kernels.normalized_row(views, torch.tensor([1]), scale, offset, torch.bfloat16)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half, ((views[1].float() / 255 - mean) / std).bfloat16())


def check_sgd_step() -> None:
    """Rows of a stack, by hand in doubles."""
    for nesterov, scale, added in (
        (False, None, False),
        (True, None, False),
        (True, 0.3, False),
        (True, None, True),
        (False, 0.3, True),
    ):
        for followed in (False, True):
            master, momentum, teacher = (random(2, 6, seed=seed) for seed in range(3))
            work, teacher_work = torch.zeros(2, 6).bfloat16(), torch.zeros(2, 6).bfloat16()
            gradient, base = random(12, seed=4), random(2, 6, seed=5)
            master[0, 1] = 0.0  # of |0| no gradient is taken
            w, v, t = (part.double().clone() for part in (master, momentum, teacher))
            g = (scale or 1.0) * gradient.double().view(2, 6) + 0.01 * w
            g += 2 * 0.2 * (w - base) + 0.05 * w.sign() if added else 0
            v = 0.9 * v + g
            w = w - 0.1 * (g + 0.9 * v if nesterov else v)
            t = 0.7 * t + 0.3 * w if followed else t
            kernels.sgd_step(
                master,
                work,
                momentum,
                gradient,
                torch.tensor(0.1),
                0.01,
                0.9,
                nesterov,
                *((teacher, teacher_work, torch.tensor(0.7)) if followed else ()),
                scale=None if scale is None else torch.tensor(scale),
                **({"base": base, "l2": 0.2, "l1": 0.05} if added else {}),
            )
            for got, wanted in ((master, w), (momentum, v), (teacher, t)):
                torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-6)
            assert torch.equal(work, (master + base if added else master).bfloat16())
            assert torch.equal(teacher_work, teacher.bfloat16()) is followed


def check_ema_step() -> None:
    target, source, work = random(8), random(8, seed=1), torch.zeros(5).bfloat16()
    wanted = 0.6 * target.double() + 0.4 * source.double()
    kept = source.clone()
    kernels.ema_step(target, source, work, torch.tensor(0.6))
    torch.testing.assert_close(target.double(), wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(work, target[:5].bfloat16()) and torch.equal(source, kept)
    kernels.ema_step(target, source, None, torch.tensor(0.0))
    assert torch.equal(target, source)


CHECKS = {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_is_what_it_says(name: str) -> None:
    CHECKS[name]()
