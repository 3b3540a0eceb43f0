"""The fused kernels against plain PyTorch: on a GPU (``-m gpu``), or anywhere in Triton's interpreter.

TRITON_INTERPRET=1 pytest tests/engine/test_kernels.py
"""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from semisfl.algorithm.losses import References
from semisfl.data.augment import Normalizer
from semisfl.engine.kernels.plain import OPERATIONS
from semisfl.engine.weights import Home
from semisfl.settings.run import OptimizerConfig

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter is for float32; on a GPU products of float32 would be rounded to TF32.
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


def near(got: Tensor, wanted: Tensor) -> None:
    """Up to the rounding of the type that is computed in."""
    error = (got.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-6)
    assert error < (1e-5 if INTERPRETED else 0.01)


def random(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def channels_last(*shape: int) -> Tensor:
    return random(*shape).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("pool", [1, 2])
@pytest.mark.parametrize("shape", [(8, 64, 12, 12), (3, 70, 7, 9), (5, 192, 6, 4), (9, 64, 26, 26)])
def test_bias_relu_pooling(shape: tuple[int, ...], pool: int) -> None:
    from semisfl.engine.kernels.pooling import bias_relu

    x, bias = channels_last(*shape), random(shape[1], dtype=torch.float32)
    x.requires_grad_()
    bias.requires_grad_()
    mine = bias_relu(x, bias, pool)
    plain = F.relu(F.max_pool2d(x.float(), pool) + bias.view(-1, 1, 1))
    near(mine, plain)
    upstream = torch.randn_like(mine)
    got = torch.autograd.grad(mine, (x, bias), upstream)
    wanted = torch.autograd.grad(plain, (x, bias), upstream.float())
    for a, b in zip(got, wanted, strict=True):
        near(a, b)


@pytest.mark.parametrize("gradient_of_images", [False, True])
@pytest.mark.parametrize(
    ("channels", "out", "size", "kernel", "pad", "pool", "clients"),
    [
        (3, 20, (10, 8), (5, 5), (0, 0), 2, 2),
        (3, 64, (8, 8), (3, 3), (1, 1), 2, 3),
        (1, 8, (9, 9), (3, 3), (1, 1), 1, 1),
        (3, 20, (7, 9), (3, 5), (1, 0), 2, 3),
        (20, 33, (6, 6), (3, 3), (1, 1), 1, 2),
        (40, 24, (6, 8), (3, 2), (0, 1), 2, 3),
        (33, 70, (7, 5), (3, 3), (0, 0), 2, 1),
        (64, 130, (4, 4), (1, 1), (0, 0), 1, 2),
    ],
)
def test_convolutions_of_several_clients(
    channels: int,
    out: int,
    size: tuple[int, int],
    kernel: tuple[int, int],
    pad: tuple[int, int],
    pool: int,
    clients: int,
    gradient_of_images: bool,
) -> None:
    from semisfl.engine.kernels.convolution import stacked_convolution

    images = 3
    x = channels_last(clients * images, channels, *size).requires_grad_(gradient_of_images)
    # As in a stack, clients' weights lie further apart than they are long.
    entries = kernel[0] * kernel[1] * channels
    room = random(clients, out * entries + 5) / entries**0.5
    weight = room[:, :-5].unflatten(1, (out, *kernel, channels)).movedim(-1, 2)
    weight = weight.detach().requires_grad_()
    bias = random(clients, out).requires_grad_()
    mine = stacked_convolution(x, weight, bias, pad, pool)
    parts = [
        F.relu(F.max_pool2d(F.conv2d(share.float(), w.float(), b.float(), padding=pad), pool))
        for share, w, b in zip(x.chunk(clients), weight, bias, strict=True)
    ]
    near(mine, torch.cat(parts))
    upstream = torch.randn_like(mine)
    leaves = [weight, bias, *([x] if gradient_of_images else [])]
    got = torch.autograd.grad(mine, leaves, upstream)
    wanted = torch.autograd.grad(torch.cat(parts), leaves, upstream.float())
    for a, b in zip(got, wanted, strict=True):
        near(a, b)


@pytest.mark.parametrize("gradient_of_images", [False, True])
@pytest.mark.parametrize(
    ("channels", "out", "size", "kernel", "pad", "stride", "clients", "biased"),
    [
        (3, 20, (9, 8), (3, 3), (1, 1), (1, 1), 2, False),
        (3, 16, (9, 8), (3, 3), (1, 1), (2, 2), 2, True),
        (20, 33, (7, 6), (3, 3), (1, 1), (2, 2), 3, False),
        (40, 24, (6, 9), (1, 1), (0, 0), (2, 2), 2, False),
        (33, 17, (8, 5), (3, 2), (0, 1), (1, 3), 1, True),
    ],
)
def test_convolutions_with_stride_and_nothing_after(
    channels: int,
    out: int,
    size: tuple[int, int],
    kernel: tuple[int, int],
    pad: tuple[int, int],
    stride: tuple[int, int],
    clients: int,
    biased: bool,
    gradient_of_images: bool,
) -> None:
    from semisfl.engine.kernels.convolution import Epilogue, fused_convolution

    x = channels_last(clients * 2, channels, *size).requires_grad_(gradient_of_images)
    entries = kernel[0] * kernel[1] * channels
    # Channels-first here: callers that stack weights of other tensors need not change their layout.
    weight = (random(clients, out, channels, *kernel) / entries**0.5).requires_grad_()
    bias = random(clients, out).requires_grad_()
    mine = fused_convolution(x, weight, bias if biased else None, pad, stride, Epilogue())
    plain = OPERATIONS["stacked_conv"](
        x.float(), weight.float(), bias.float() if biased else None, stride, pad, (1, 1), 1
    )
    near(mine, plain)
    upstream = torch.randn_like(mine)
    leaves = [weight, *([bias] if biased else []), *([x] if gradient_of_images else [])]
    got = torch.autograd.grad(mine, leaves, upstream)
    wanted = torch.autograd.grad(plain, leaves, upstream.float())
    for a, b in zip(got, wanted, strict=True):
        near(a, b)


@pytest.mark.skipif(INTERPRETED, reason="cuDNN is on a GPU")
@pytest.mark.parametrize(("kernel", "pad", "stride"), [(3, 1, 1), (3, 1, 2), (1, 0, 2), (5, 0, 1)])
def test_cudnn_client_by_client(kernel: int, pad: int, stride: int) -> None:
    from semisfl.engine.kernels.one_each import convolutions_in_turn

    x = channels_last(6, 16, 11, 10).requires_grad_()
    weight = (random(3, 24, kernel, kernel, 16).movedim(-1, 2) / 4 / kernel).requires_grad_()
    mine = convolutions_in_turn(x, weight, (stride, stride), (pad, pad))
    plain = OPERATIONS["stacked_conv"](
        x.float(), weight.float(), None, (stride, stride), (pad, pad), (1, 1), 1
    )
    near(mine, plain)
    upstream = torch.randn_like(mine)
    got = torch.autograd.grad(mine, (x, weight), upstream)
    wanted = torch.autograd.grad(plain, (x, weight), upstream.float())
    for a, b in zip(got, wanted, strict=True):
        near(a, b)


def test_a_convolution_does_not_hide_nan() -> None:
    from semisfl.engine.kernels.convolution import stacked_convolution

    x = channels_last(1, 3, 4, 4)
    x[0, 0, 1, 1] = float("nan")
    weight = random(1, 16, 3, 3, 3).movedim(-1, 2)
    for pool in (1, 2):
        assert stacked_convolution(x, weight, random(1, 16), (1, 1), pool).isnan().any()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("shape", "clients", "relu", "pool", "shifted"),
    [
        ((6, 5, 4, 6), 2, True, 2, True),
        ((6, 5, 7, 9), 3, True, 2, False),  # an odd last row and column
        ((4, 130, 5, 3), 1, True, 1, True),
        ((4, 16, 9, 8), 2, False, 1, False),
        ((12, 70), 2, True, 1, True),
        ((6, 3, 11), 1, False, 1, True),
        ((2, 2, 70, 70), 2, True, 2, True),  # several programs share a sum
    ],
)
def test_batchnorm_of_several_clients(
    shape: tuple[int, ...], clients: int, relu: bool, pool: int, shifted: bool, training: bool
) -> None:
    from semisfl.engine.kernels.normalisation import fused_norm

    x = random(*shape) * 2 + 30  # far from 0: sums of squares alone would lose all digits
    x = (channels_last(*shape).copy_(x) if x.dim() == 4 else x).requires_grad_()
    # As in a stack, clients' weights lie further apart than they are long.
    rows = [random(clients, shape[1] + 3, dtype=torch.float32)[:, :-3] for _ in range(5)]
    shift, weight, bias, mean, variance = rows
    mean, variance = mean + (0 if training else 30), variance.abs() + 0.5
    leaves = [t.detach().requires_grad_() for t in (shift, weight, bias)]
    start = leaves[0].to(DTYPE) if shifted else None
    kept, plain_kept = [mean.clone(), variance.clone()], [mean.clone(), variance.clone()]
    how = (training, 0.1, 1e-5, relu, pool)
    mine = fused_norm(x, start, *leaves[1:], *kept, *how)
    exact = x.double(), None if start is None else start.double(), *(t.double() for t in leaves[1:])
    plain = OPERATIONS["norm_relu_pool"](*exact, *(p := [t.double() for t in plain_kept]), *how)
    near(mine, plain)
    for got, wanted in zip(kept, p, strict=True):
        near(got, wanted)
    upstream = torch.randn_like(mine)
    of = [x, *leaves[not shifted :]]
    got = torch.autograd.grad(mine, of, upstream)
    wanted = torch.autograd.grad(plain, of, upstream.double())
    for tensor, a, b in zip(of, got, wanted, strict=True):
        if training and tensor is leaves[0]:
            assert not a.any() and b.abs().max() < 1e-6  # what is added to all, the mean takes away
        else:
            near(a, b)


@pytest.mark.parametrize(("channels", "pool"), [(3, 2), (20, 1), (20, 2)])
def test_a_convolution_that_normalises(channels: int, pool: int) -> None:
    """As a teacher's does, by running statistics; some of them turn large values into small ones."""
    from semisfl.engine.kernels.convolution import Epilogue, normed_convolution
    from semisfl.engine.kernels.normalisation import settled

    x, weight = channels_last(6, channels, 9, 8), random(3, 18, channels, 3, 3) / 4
    rows = [random(3, 18, dtype=torch.float32) for _ in range(5)]
    rows[4] = rows[4].abs() + 0.5
    known = settled(x, x.new_empty(1), tuple(rows), eps=1e-3)  # type: ignore[arg-type]
    mine = normed_convolution(x, weight, known, (1, 1), (1, 1), Epilogue(True, pool))
    plain = OPERATIONS["conv_norm_relu_pool"](
        x.float(), weight.float(), rows[0], (1, 1), (1, 1), (1, 1), 1, *rows[1:],
        False, 0.1, 1e-3, True, pool,
    )  # fmt: skip
    near(mine, plain)


def test_batchnorm_does_not_hide_nan() -> None:
    from semisfl.engine.kernels.normalisation import fused_norm

    x = channels_last(2, 3, 4, 4)
    x[0, 0, 1, 1] = float("nan")
    for pool in (1, 2):
        rows = [torch.ones(1, 3, device=DEVICE) for _ in range(4)]
        assert fused_norm(x, None, *rows, False, 0.1, 1e-5, True, pool).isnan().any()


def test_batchnorm_of_one_value_is_refused() -> None:
    from semisfl.engine.kernels.normalisation import fused_norm

    rows = [torch.ones(2, 3, device=DEVICE) for _ in range(4)]
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        fused_norm(random(2, 3), None, *rows, True, 0.1, 1e-5, True, 1)


def test_tensors_beyond_32_bit_offsets_are_refused() -> None:
    from semisfl.engine.kernels.pooling import check_size

    check_size(torch.empty(1).expand(2**31 - 1))
    with pytest.raises(ValueError, match=r"clients\.batch"):
        check_size(torch.empty(4), torch.empty(1).expand(2**31))


@pytest.mark.parametrize("count", [7, 1500])
def test_contrast(count: int) -> None:
    from semisfl.engine.kernels.clustering import fused_contrast

    z = F.normalize(random(9, 8, dtype=torch.float32), dim=1).requires_grad_()
    references = References(
        F.normalize(random(count, 8, dtype=torch.float32), dim=1),
        torch.randint(0, 4, (count,), device=DEVICE),
        torch.rand(count, device=DEVICE) < 0.6,
        torch.rand(count, device=DEVICE) < 0.8,
    )
    labels = torch.arange(9, device=DEVICE) % 6  # two of them nobody else has
    mine = fused_contrast(z, labels, references, 0.1)
    plain = OPERATIONS["contrast"](z, labels, *references, 0.1)
    torch.testing.assert_close(mine, plain)
    got, wanted = (torch.autograd.grad(2 * loss, z)[0] for loss in (mine, plain))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)
    nobody = references._replace(present=torch.zeros_like(references.present))
    assert float(fused_contrast(z.detach(), labels, nobody, 0.1)) == 0


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(("rows", "width", "out"), [(64, 40, 10), (131, 33, 70)])
def test_a_linear_layer(rows: int, width: int, out: int, relu: bool) -> None:
    from semisfl.engine.kernels.linear import fused_linear

    inputs = [random(rows, width), random(out, width) / width**0.5, random(out)]
    for tensor in inputs:
        tensor.requires_grad_()
    mine = fused_linear(*inputs, relu)
    exact = [tensor.detach().float().requires_grad_() for tensor in inputs]
    # What is open is decided by what was rounded.
    right = F.linear(*exact) * (1 if not relu else (mine != 0))
    near(mine, right)
    upstream = torch.randn_like(mine)
    got = torch.autograd.grad(mine, inputs, upstream)
    for a, b in zip(got, torch.autograd.grad(right, exact, upstream.float()), strict=True):
        near(a, b)


def test_a_linear_layer_does_not_hide_nan() -> None:
    from semisfl.engine.kernels.linear import fused_linear

    x, weight, bias = random(4, 8).requires_grad_(), random(6, 8), random(6)
    weight[2] = float("nan")
    out = fused_linear(x, weight.requires_grad_(), bias.requires_grad_(), True)
    of_bias = torch.autograd.grad(out, bias, torch.full_like(out, float("nan")))[0]
    assert out[:, 2].isnan().all() and of_bias[2].isnan()


@pytest.mark.parametrize("width", [128, 100])
def test_unit_vectors(width: int) -> None:
    from semisfl.engine.kernels.by_row import fused_unit

    x = random(9, width)
    x[3], x[4] = 0, 1e-9
    x.requires_grad_()
    exact = x.detach().float().requires_grad_()
    mine, right = fused_unit(x), OPERATIONS["unit_rows"](exact)
    assert torch.allclose(mine, right, atol=1e-6)
    upstream = torch.randn_like(mine)
    (got,), (wanted,) = (
        torch.autograd.grad(y, z, upstream) for y, z in ((mine, x), (right, exact))
    )
    near(got, wanted)


@pytest.mark.parametrize("weights", ["none", "bool", "float"])
@pytest.mark.parametrize("classes", [10, 101])
def test_cross_entropy(classes: int, weights: str) -> None:
    from semisfl.engine.kernels.by_row import fused_entropy

    logits = (3 * random(37, classes)).requires_grad_()
    labels = torch.arange(37, device=DEVICE) % classes
    confident = None
    if weights != "none":
        labels[5] = -1
        confident = torch.rand(37, device=DEVICE)
        confident = confident > 0.4 if weights == "bool" else confident
    exact = logits.detach().float().requires_grad_()
    right = OPERATIONS["cross_entropy"](exact, labels, confident)
    mine = fused_entropy(logits, labels, confident)
    assert torch.allclose(mine, right, rtol=1e-5)
    (got,), (wanted,) = (torch.autograd.grad(2 * y, z) for y, z in ((mine, logits), (right, exact)))
    near(got, wanted)


@pytest.mark.parametrize(("parts", "size"), [(1, 70), (131, 70), (33, 500)])
def test_parts_of_a_sum(parts: int, size: int) -> None:
    from semisfl.engine.kernels.partial_sums import added_up

    values = random(parts, 2, size, dtype=torch.float32)
    near(added_up(values, DTYPE), values.sum(0))


def test_a_row_of_images() -> None:
    from semisfl.engine.kernels.images import normalized_row

    views = torch.randint(0, 256, (4, 3, 3, 5, 6), dtype=torch.uint8, device=DEVICE)
    normalizer = Normalizer.of((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)).to(DEVICE)
    counter = torch.tensor([2], device=DEVICE)
    mine = normalized_row(views, counter, normalizer.scale, normalizer.offset, torch.float32)
    plain = normalizer(views[2])
    torch.testing.assert_close(mine, plain)
    assert mine.stride() == plain.stride()


@pytest.mark.parametrize(
    ("followed", "scale", "added"),
    [(False, None, False), (True, None, False), (False, 0.25, False), (False, None, True)],
)
def test_a_step_of_rows_that_lie_apart(followed: bool, scale: float | None, added: bool) -> None:
    from semisfl.engine.kernels.update import fused_sgd

    config = OptimizerConfig()
    flat = [random(100, dtype=torch.float32) for _ in range(4)]
    master, momentum, teacher, base = flat
    master[7] = 0.0  # of |0| no gradient is taken
    work, teacher_work = (t.to(torch.bfloat16) for t in (master, teacher))
    gradient = random(3, 20, dtype=torch.float32)
    lr, decay = torch.tensor(0.1, device=DEVICE), torch.tensor(0.7, device=DEVICE)
    home = Home(None, 5, 20, rows=3, stride=30)  # type: ignore[arg-type]
    wanted = [t.clone() for t in flat]
    for row in range(3):
        place = slice(5 + 30 * row, 25 + 30 * row)
        weight, velocity, mine, below = (t[place] for t in wanted)
        upstream = (scale or 1.0) * gradient[row] + config.weight_decay * weight
        if added:
            upstream += 2 * 0.2 * (weight - below) + 0.05 * weight.sign()
        velocity.mul_(config.momentum).add_(upstream)
        weight.sub_(0.1 * (upstream + config.momentum * velocity))
        if followed:
            mine.mul_(0.7).add_(0.3 * weight)
    along = (home.of(teacher), home.of(teacher_work), decay) if followed else ()
    fused_sgd(
        home.of(master), home.of(work), home.of(momentum), gradient, lr,
        config.weight_decay, config.momentum, True, *along,
        scale=None if scale is None else torch.tensor(scale, device=DEVICE),
        **({"base": home.of(base), "l2": 0.2, "l1": 0.05} if added else {}),
    )  # fmt: skip
    for got, expected in zip(flat, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    if added:
        home.of(master).add_(home.of(base))
    for copy, of in ((work, master), (teacher_work, teacher)):
        torch.testing.assert_close(copy.float(), of, rtol=0.01, atol=0)


@pytest.mark.skipif(not INTERPRETED, reason="takes 20 GB of memory; a sparse file takes none")
def test_a_step_of_rows_that_lie_farther_apart_than_32_bits_can_count(tmp_path: Path) -> None:
    from semisfl.engine.kernels.update import fused_sgd

    rows, stride, size = 3, 2**30, 8

    def sparse(name: str) -> Tensor:
        count = (rows - 1) * stride + size
        flat = torch.from_file(str(tmp_path / name), shared=True, size=count)
        return flat.as_strided((rows, size), (stride, 1))

    master, work, momentum = map(sparse, ("master", "work", "momentum"))
    gradient = torch.ones(rows, size)
    fused_sgd(master, work, momentum, gradient, torch.tensor(0.5), 0.0, 0.9, False)
    assert torch.equal(master, -0.5 * gradient) and torch.equal(work, master)
